"""The pictures of the README and of the pages, apart from the house."""

from __future__ import annotations

from tests.pages.drawing import Drawing


def overview() -> str:
    """The README's: one script, three ways to start it, the same numbers."""
    sheet = Drawing(680, 336, "One script on one device, two devices and two workers: the same numbers")
    sheet.box(12, 12, 290, 188)
    sheet.text(26, 36, "train.py", "bold", "start")
    script = (
        "strategy = kdist.…Strategy()",
        "with strategy.scope():",
        "    model = keras.Sequential(…)",
        "    model.compile(…)",
        "model.fit(x, y, batch_size=128)",
    )
    for number, line in enumerate(script):
        sheet.text(26, 64 + number * 22, line, "mono", "start")
    sheet.text(26, 186, "one global batch: 128 rows", "soft small", "start")
    sheet.text(157, 228, "KERAS_BACKEND=", "mono")
    for number, backend in enumerate(("tensorflow", "jax", "torch")):
        sheet.box(12 + number * 98, 240, 94, 28)
        sheet.text(59 + number * 98, 259, backend, "mono")
    ways = (
        ("OneDeviceStrategy", "one device", [128]),
        ("MirroredStrategy", "one process, two devices", [64, 64]),
        ("MultiWorkerMirroredStrategy", "two workers: kdist run -n 2", [64, 64]),
    )
    for lane, (strategy, words, shares) in enumerate(ways):
        y = 12 + lane * 88
        sheet.arrow((304, 106), (330, 106), (330, y + 58), (352, y + 58))
        sheet.text(360, y + 14, strategy, "bold", "start")
        sheet.text(360, y + 32, words, "soft small", "start")
        x = 360.0
        for replica, share in enumerate(shares):
            gap = 14 if lane == 2 and replica else 0
            width = share * 2.36 - (7 if lane == 2 else 0)
            sheet.box(x + gap, y + 42, width, 32, f"replica{replica}")
            sheet.text(x + gap + width / 2, y + 63, f"{share} rows")
            x += width
    sheet.box(12, 286, 656, 38)
    sheet.text(340, 310, "the same weights after every step, and the same history, to rounding", "bold")
    return sheet.svg()
