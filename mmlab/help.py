"""The static help of the command line, read from the conf folder without composing anything."""

from __future__ import annotations

from pathlib import Path

HEADER = ("question", "command", "needs", "expect")
VERBS = {
    "train": "train one run, or with -m a sweep of runs",
    "generate": "continue prompts, or answer them, with a trained or imported model",
    "evaluate": "measure a checkpoint: likelihood, minimal pairs, multiple choice, exact match",
    "prepare": "make vocabularies and token files",
}
EXAMPLES = {
    "generate": (
        ('checkpoint=runs/NAME/TIME prompt="Once upon"', "go on from a text, printed as it comes"),
        ("checkpoint=FOLDER chat=true prompt=...", "ask a Hugging Face folder or a run with a chat template"),
        ("checkpoint=... prompts=FILE output=FILE.jsonl", "many prompts, one row each"),
        ("checkpoint=... prompt=... sampling.temperature=0", "greedy"),
    ),
    "evaluate": (
        (
            "checkpoint=runs/NAME/TIME evaluation=likelihood ...",
            "loss, perplexity and bits per byte of documents",
        ),
        ("checkpoint=... evaluation=blimp evaluation.path=FILE", "minimal pairs"),
        ("-m checkpoint=A,B evaluation=...", "several, one after another"),
    ),
    "prepare": (
        ("preparation=vocabulary ...", "train a byte-pair vocabulary, stored as tiktoken ranks"),
        ("preparation=tokens ...", "tokenize documents into the cache, in parallel"),
        ("preparation=named name=gpt2", "fetch a published vocabulary into the cache"),
    ),
}


def general() -> str:
    """What `mmlab --help` prints."""
    lines = ["mmlab VERB key=value ...", "", "Verbs:"]
    lines += [f"  {verb:<12}{what}" for verb, what in VERBS.items()]
    lines += ["", "Experiments (mmlab train experiment=NAME):", *_experiments()]
    lines += ["", 'Help on a verb: mmlab VERB --help. Completion: eval "$(mmlab -sc install=bash)".']
    return "\n".join(lines)


def train() -> str:
    """What `mmlab train --help` prints."""
    lines = [
        "mmlab train [-m] key=value ...",
        "",
        "  mmlab train                                      the default experiment",
        "  mmlab train experiment=text/python seed=1        another seed",
        "  mmlab train -m backbone.qk_norm=true,false       a sweep: one run for each value",
        "  mmlab train strategy=ddp devices=2               two processes",
        "  mmlab train precision=bf16-mixed                 other number types",
        "  mmlab train debug=fast                           a few steps, to see that it works",
        "  mmlab train resume=auto                          go on with the newest run of the same identity",
        "  mmlab train resume=runs/NAME/TIME                go on with that run",
        "",
        "Experiments:",
        *_experiments(),
        "",
        "Groups (group=option):",
        *_groups(),
        "",
        "Flags:",
        "  --cfg job [--resolve]    print the configuration and stop (-p KEY: a part of it)",
        "  -m, --multirun           run every combination of values that are separated by commas",
        "  --info [defaults]        how the configuration is composed",
        "",
        "Text with spaces, commas or other marks is quoted twice: \"name='my run'\".",
        "A key's meaning stands in the docstring of its config class; all keys: mmlab train --cfg job.",
        "HYDRA_FULL_ERROR=1 shows the whole stack of an error.",
    ]
    return "\n".join(lines)


def other(verb: str) -> str:
    """What `mmlab VERB --help` prints for a verb other than train: examples and its entry file."""
    usage = [f"mmlab {verb} {words}" for words, _ in EXAMPLES[verb]]
    width = max(map(len, usage))
    lines = [f"mmlab {verb} key=value ...", "", VERBS[verb], ""]
    lines += [f"  {words:<{width}}  {what}" for words, (_, what) in zip(usage, EXAMPLES[verb], strict=True)]
    entry = (conf_folder() / f"{verb}.yaml").read_text(encoding="utf-8").splitlines()
    lines += ["", "Keys:", *(f"  {line}" for line in entry)]
    return "\n".join(lines)


def header(path: Path) -> dict[str, str]:
    """The comment lines (question, command, needs, expect) that an experiment begins with."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = {}
    for number, name in enumerate(HEADER, start=1):  # line 0 tells Hydra the package; it looks no further
        mark = f"# {name}: "
        if len(lines) <= number or not lines[number].startswith(mark):
            raise ValueError(f"{path}: line {number + 1} must begin with {mark!r}")
        found[name] = lines[number].removeprefix(mark).strip()
    return found


def conf_folder() -> Path:
    """The folder of config groups: inside the installed package, else beside it in the repository."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def experiments() -> dict[str, Path]:
    """Every experiment's file, by the name that `experiment=` takes."""
    root = conf_folder() / "experiment"
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}


def _experiments() -> list[str]:
    lines = []
    for name, path in experiments().items():
        notes = header(path)
        lines += [f"  {name:<20}{notes['question']}", f"  {'':<20}needs {notes['needs']}"]
    return lines


def _groups() -> list[str]:
    root = conf_folder()
    options: dict[str, list[str]] = {}
    for path in sorted(root.rglob("*/*.yaml")):
        group = path.parent.relative_to(root).as_posix()
        if group.split("/")[0] != "experiment":
            options.setdefault(group, []).append(path.stem)
    return [f"  {group:<16}{', '.join(names)}" for group, names in options.items()]
