"""Draws training and validation loss of a run as an SVG, from its metrics.csv.

python experiments/reports/curve.py RUN_FOLDER OUTPUT.svg
"""

import csv
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM = 640, 280, 56, 40
COLOURS = {"train/loss": "#7a9cc6", "val/loss": "#c0392b"}


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of both losses."""
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {tag: [(int(row["step"]), float(row[tag])) for row in rows if row.get(tag)] for tag in COLOURS}


def draw(curves: dict[str, list[tuple[int, float]]]) -> str:
    """The SVG: loss in nats a token over optimizer steps."""
    last = max(step for points in curves.values() for step, _ in points)
    high = max(value for points in curves.values() for _, value in points)
    low = min(value for points in curves.values() for _, value in points)

    def at(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - 12) * step / last
        return x, 12 + (HEIGHT - BOTTOM - 12) * (high - value) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    ]
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    for tick in range(int(low) + 1, int(high) + 1):
        x, y = at(0, tick)
        parts.append(f'<path d="M{x:.0f} {y:.1f}H{WIDTH - 12}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 8:.0f}" y="{y + 4:.1f}" font-size="12" text-anchor="end">{tick}</text>')
    for quarter in range(5):
        x, _ = at(last * quarter / 4, low)
        label = f'<text x="{x:.0f}" y="{HEIGHT - 18}" font-size="12" text-anchor="middle">'
        parts.append(f"{label}{last * quarter // 4}</text>")
    for number, (tag, points) in enumerate(curves.items()):
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[tag]}" stroke-width="1.6"/>')
        dots = [at(*point) for point in points] if len(points) < 20 else []
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{COLOURS[tag]}"/>' for x, y in dots]
        legend = f'<text x="{WIDTH - 120}" y="{30 + 18 * number}" font-size="13" fill="{COLOURS[tag]}">'
        parts.append(f"{legend}{tag}</text>")
    parts.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 3}" font-size="12" text-anchor="middle">step</text></svg>'
    )
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(draw(read(Path(sys.argv[1]))), encoding="utf-8")
