"""The colours of the page, light and dark. Charts are made in the light ones; the page swaps them.

A colour has the same meaning in all charts: orange is stock, blue is planned, green is measured. Colours also differ
in lightness, and lines in their dashes, for readers with colour blindness.
"""

from __future__ import annotations

LIGHT = {
    "stock": "#b45309",
    "planned": "#2456d6",
    "measured": "#0b7a53",
    "beforehand": "#7c3aed",
    "page": "#ffffff",
    "text": "#1b1f24",
    "muted": "#57606a",
    "rule": "#d8dee4",
    "surface": "#f6f8fa",
    "idle": "#8c959f",
    "cheap": "#cfe0fc",
    "costly": "#0b3a8f",
}

DARK = {
    "stock": "#f0a35e",
    "planned": "#7ba7ff",
    "measured": "#4cc790",
    "beforehand": "#b794f6",
    "page": "#0f1419",
    "text": "#e6edf3",
    "muted": "#9aa6b2",
    "rule": "#2b333d",
    "surface": "#171d24",
    "idle": "#7d8894",
    "cheap": "#2f5590",
    "costly": "#d6e6ff",
}
