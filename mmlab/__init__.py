"""One transformer backbone and one data layer for text, speech and vision."""
