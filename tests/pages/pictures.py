"""Draws the pictures of the README and of the pages."""

from __future__ import annotations

import importlib.util

from tests.helpers.layers import ROOT
from tests.pages.drawing import Drawing


def overview() -> str:
    """Draws the picture of the README: one script, three ways to start it, the same updates."""
    sheet = Drawing(680, 336, "One script on one device, two devices and two workers, which share each batch")
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
    sheet.text(340, 310, "every replica applies the same update: the gradient of all 128 rows", "bold")
    return sheet.svg()


def step() -> str:
    """Draws a step under data parallelism: eight rows, three replicas."""
    sheet = Drawing(
        680, 470, "A step: three replicas share a global batch of eight rows and keep equal weights"
    )
    shares, columns = (3, 3, 2), (20, 240, 460)
    colors = [f"replica{replica}" for replica, share in enumerate(shares) for _ in range(share)]
    sheet.text(340, 26, "a global batch of 8 rows", "bold")
    sheet.rows(268, 36, colors)
    for replica, (x, share) in enumerate(zip(columns, shares, strict=True)):
        middle = x + 100
        sheet.arrow((340, 56), (340, 70), (middle, 70), (middle, 92))
        sheet.box(x, 94, 200, 138)
        sheet.text(middle, 116, f"replica {replica}", "bold")
        sheet.rows(middle - share * 9, 126, [f"replica{replica}"] * share)
        sheet.box(x + 20, 152, 160, 26, "model")
        sheet.text(middle, 170, "the same weights", "small")
        sheet.text(middle, 199, "forward, loss, backward", "soft small")
        sheet.text(middle, 219, f"gradient of its {share} rows", "small")
        sheet.arrow((middle, 234), (middle, 262))
    sheet.box(20, 264, 640, 66)
    sheet.text(340, 290, "one collective: the sum over all replicas", "bold")
    sheet.text(
        340, 314, "⅜ × gradient 0  +  ⅜ × gradient 1  +  ²⁄₈ × gradient 2  =  gradient of all 8 rows", "small"
    )
    for x in columns:
        middle = x + 100
        sheet.arrow((middle, 332), (middle, 358))
        sheet.box(x, 360, 200, 60)
        sheet.text(middle, 383, "clip, optimizer.apply", "soft small")
        sheet.box(x + 20, 390, 160, 24, "model")
        sheet.text(middle, 407, "the same new weights", "small")
    sheet.text(
        340, 450, "Metrics are added up, and moving statistics averaged, in the same way.", "soft small"
    )
    return sheet.svg()


def batch() -> str:
    """Draws the path of a batch from the user's data to a step, on two workers."""
    sheet = Drawing(680, 520, "The way of a batch, from the data of the user to the step, on two workers")
    for worker in (0, 1):
        x = 20 + worker * 330
        sheet.box(x, 40, 310, 466, "ground", dashed=True)
        sheet.text(x + 155, 28, f"worker {worker}", "bold")
        for y, title, words in (
            (54, "your dataset", "arrays, tf.data, DataLoader, PyDataset, …"),
            (164, "kdist/data/reading.py", "keeps the rows of its own replicas"),
            (274, "kdist/data/prefetch.py", "a thread reads ahead, fills the devices"),
            (368, "kdist/data/agreement.py", "all workers have the next batch"),
            (444, "the step", "each replica computes with its rows"),
        ):
            sheet.box(x + 14, y, 282, 50)
            sheet.text(x + 155, y + 21, title, "bold")
            sheet.text(x + 155, y + 39, words, "soft small")
        both = ["replica0"] * 4 + ["replica1"] * 4
        sheet.rows(x + 84, 114, both)
        sheet.arrow((x + 155, 136), (x + 155, 162))
        sheet.rows(x + 84, 224, [c if c == f"replica{worker}" else "ground" for c in both])
        sheet.arrow((x + 155, 246), (x + 155, 272))
        sheet.arrow((x + 155, 326), (x + 155, 366))
        sheet.arrow((x + 155, 420), (x + 155, 442))
        sheet.text(x + 230, 150, "a global batch", "soft small")
        sheet.text(x + 230, 260, "its share", "soft small")
    sheet.arrow((318, 393), (362, 393))
    sheet.arrow((362, 393), (318, 393))
    return sheet.svg()


# Each strategy's subtitle and devices. A device has a worker, a name, its rows of a batch of four, and the
# quarters of the variables that it stores.
ALL = (0, 1, 2, 3)
HOLDERS = {
    "OneDeviceStrategy": ("one process, one device", [(0, "device 0", ALL, ALL)]),
    "MirroredStrategy": (
        "one process, one replica per device",
        [(0, "device 0", (0, 1), ALL), (0, "device 1", (2, 3), ALL)],
    ),
    "MultiWorkerMirroredStrategy": (
        "several processes",
        [(0, "device 0", (0, 1), ALL), (1, "device 0", (2, 3), ALL)],
    ),
    "CentralStorageStrategy": (
        "one device holds all variables",
        [(0, "device 0", (0, 1), ()), (0, "device 1", (2, 3), ()), (0, "holder", (), ALL)],
    ),
    "FullyShardedStrategy": (
        "each replica holds a part",
        [(0, "device 0", (0, 1), (0, 1)), (1, "device 0", (2, 3), (2, 3))],
    ),
    "ModelParallelStrategy": (
        "a mesh: 2 for rows × 2 for variables",
        [
            (0, "device 0", (0, 1), (0, 1)),
            (0, "device 1", (0, 1), (2, 3)),
            (1, "device 0", (2, 3), (0, 1)),
            (1, "device 1", (2, 3), (2, 3)),
        ],
    ),
    "ParameterServerStrategy": (
        "each worker takes its own batches",
        [
            (0, "worker 0", ALL, ()),
            (1, "worker 1", ALL, ()),
            (2, "server 0", (), (0, 1)),
            (3, "server 1", (), (2, 3)),
        ],
    ),
}


def holders() -> str:
    """Draws the rows and variables of each device, for each strategy."""
    sheet = Drawing(
        680, 76 + 88 * len(HOLDERS), "Which rows and which variables each device has, by strategy"
    )
    sheet.rows(20, 16, ["replica0", "replica1"])
    sheet.text(62, 29, "rows that the device computes", "small", "start")
    sheet.rows(280, 16, ["model"])
    sheet.text(304, 29, "variables that it stores", "small", "start")
    sheet.box(450, 14, 30, 20, "ground", dashed=True)
    sheet.text(488, 29, "one process", "small", "start")
    for lane, (strategy, (words, devices)) in enumerate(HOLDERS.items()):
        y = 56 + lane * 88
        sheet.text(20, y + 28, strategy, "bold", "start")
        sheet.text(20, y + 48, words, "soft small", "start")
        for number, (worker, name, rows, parts) in enumerate(devices):
            x = 280 + number * 98
            first = not any(device[0] == worker for device in devices[:number])
            if first:
                together = sum(device[0] == worker for device in devices)
                sheet.box(x - 3, y - 3, together * 98 - 6, 80, "ground", dashed=True)
            sheet.box(x + 2, y + 2, 84, 70)
            sheet.text(x + 44, y + 18, name, "small")
            asynchronous = strategy.startswith("Parameter")
            color = [f"replica{worker if asynchronous else row // 2}" for row in ALL]
            sheet.rows(x + 9, y + 26, [color[row] if row in rows else "ground" for row in ALL])
            sheet.rows(x + 9, y + 48, ["model" if part in parts else "ground" for part in ALL])
    return sheet.svg()


def choice() -> str:
    """Draws the questions that lead to a strategy, each with its answers on the right."""
    questions = (
        (
            "Does the model fit on one device?",
            "no",
            "FullyShardedStrategy",
            "or ModelParallelStrategy; JAX, PyTorch",
        ),
        (
            "Do workers join and leave,",
            "yes",
            "ParameterServerStrategy",
            "asynchronous: results differ in each run",
        ),
        ("Is it JAX on TPUs?", "yes", "TPUStrategy", "the devices of all hosts"),
        (
            "Must all devices be in one process,",
            "yes",
            "MirroredStrategy",
            "no launcher; not for speed on PyTorch",
        ),
    )
    second = {1: "or is a huge embedding the problem?", 3: "for example in a notebook?"}
    sheet = Drawing(680, 40 + 92 * len(questions) + 56, "Which strategy: a tree of questions")
    for number, (question, answer, strategy, words) in enumerate(questions):
        y = 16 + number * 92
        sheet.box(20, y, 310, 56)
        if number in second:
            sheet.text(175, y + 24, question, "bold")
            sheet.text(175, y + 43, second[number], "bold")
        else:
            sheet.text(175, y + 33, question, "bold")
        sheet.arrow((332, y + 28), (388, y + 28))
        sheet.text(358, y + 21, answer, "soft")
        sheet.box(390, y, 274, 56, "replica0")
        sheet.text(527, y + 24, strategy, "bold")
        sheet.text(527, y + 43, words, "small")
        sheet.arrow((175, y + 58), (175, y + 90))
        sheet.text(188, y + 79, "yes" if answer == "no" else "no", "soft", "start")
    y = 16 + 92 * len(questions)
    sheet.box(20, y, 310, 56, "replica0")
    sheet.text(175, y + 24, "MultiWorkerMirroredStrategy", "bold")
    sheet.text(175, y + 43, "one worker, or many: kdist run, Slurm, …", "small")
    return sheet.svg()


def scaling() -> str:
    """Draws the efficiency for 1 to 4,096 workers over three links, by benchmarks/step_model.py."""
    path = ROOT / "benchmarks" / "step_model.py"
    spec = importlib.util.spec_from_file_location("step_model", path)
    assert spec is not None and spec.loader is not None
    model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(model)
    sheet = Drawing(680, 330, "The efficiency by the number of workers, over links of 1, 10 and 100 Gbit/s")
    left, top, width, height = 60, 20, 480, 260
    sheet.box(left, top, width, height)
    for percent in (0, 25, 50, 75, 100):
        y = top + height * (1 - percent / 100)
        sheet.text(left - 10, y + 5, f"{percent} %", "small", "end")
    counts = [4**power for power in range(7)]
    for power, workers in enumerate(counts):
        sheet.text(left + width * power / 6, top + height + 20, f"{workers:,}", "small")
    sheet.text(left + width / 2, top + height + 42, "workers", "soft")
    for gbit_per_s in (100, 10, 1):
        points = []
        for power, workers in enumerate(counts):
            step = model.step_ms(150, model.exchange_ms(workers, 102, gbit_per_s, 30), 0.6)
            points.append((left + width * power / 6, top + height * (1 - 150 / step)))
        sheet.arrow(*points, head=False)
        sheet.text(left + width + 10, points[-1][1] + 5, f"{gbit_per_s} Gbit/s", "small", "start")
    return sheet.svg()
