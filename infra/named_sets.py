"""Find data files, and read the data sets that have a name: published ones, from a folder or the hub, and
generated sums."""

import random
import re
from pathlib import Path

from infra.rows import READERS, Rows
from settings.loader import ConfigError, in_short
from settings.paths import REPOSITORY, find_path

# name -> (problems, file in data.dir, name on the hub)
NAMED_SETS = {
    "gsm8k_train": (7473, "gsm8k_train.jsonl", "openai/gsm8k:main:train"),
    "gsm8k": (1319, "gsm8k_test.jsonl", "openai/gsm8k:main:test"),
    "math_train": (7500, "math_train.jsonl", "DigitalLearningGmbH/MATH-lighteval:default:train"),
    "math500": (500, "math500.jsonl", "HuggingFaceH4/MATH-500:default:test"),
    "aime24": (30, "aime24.jsonl", "HuggingFaceH4/aime_2024:default:train"),
    "aime25": (30, "aime25.jsonl", "math-ai/aime25:default:test"),
    "aime26": (30, "aime26.jsonl", "MathArena/aime_2026:default:train"),
    "hmmt_feb25": (30, "hmmt_feb25.jsonl", "MathArena/hmmt_feb_2025:default:train"),
    "hmmt_nov25": (30, "hmmt_nov25.jsonl", "MathArena/hmmt_nov_2025:default:train"),
    "hmmt_feb26": (33, "hmmt_feb26.jsonl", "MathArena/hmmt_feb_2026:default:train"),
    "brumo25": (30, "brumo25.jsonl", "MathArena/brumo_2025:default:train"),
    "gpqa_diamond": (198, "gpqa_diamond.jsonl", "Idavidrein/gpqa:gpqa_diamond:train"),
    "amc23": (40, "amc23.jsonl", "math-ai/amc23:default:test"),
    "minerva": (272, "minerva_math.jsonl", "math-ai/minervamath:default:test"),
    # 674 on the hub
    "olympiad": (675, "olympiadbench.jsonl", "Hothan/OlympiadBench:OE_TO_maths_en_COMP:train"),
}
SUMS = 300  # problems of a generated set
GENERATED = re.compile(r"sums-\d+")
CHOICES = (f"give a {', '.join(READERS)} file, one of {', '.join(NAMED_SETS)}, sums-SEED for generated sums, "
           "or a hub name such as openai/gsm8k:main:train")


def find_file(name: str | Path) -> Path:
    """Find the file of a data set. Raises ConfigError."""
    path = find_path(name)
    if not path.is_file():
        places = dict.fromkeys((Path.cwd(), REPOSITORY))
        where = "" if path.is_absolute() else f" from {', nor from '.join(map(str, places))}"
        raise ConfigError(f"data file {path} not found{where}; {CHOICES}")
    return path


def find_named(name: str, folder: str | None) -> Path | None:
    """Find the file of a named set in `folder`; None for a set of the hub. Raises ConfigError if the name is
    neither's."""
    if folder and name in NAMED_SETS:
        return find_file(Path(folder, NAMED_SETS[name][1]))
    if name in NAMED_SETS or GENERATED.fullmatch(name) or (name.count(":") == 2 and "/" in name):
        return None
    raise ConfigError(f"data set {name!r} is not known; {CHOICES}")


def read_named(name: str) -> Rows:
    """Yield a place and the row for each row of generated sums, or of a set on the hub, a named one or
    "user/set:config:split". Raises ConfigError."""
    if GENERATED.fullmatch(name):
        yield from generate_sums(name)
        return
    import datasets  # slow to import, and needed for names only

    hub_name = NAMED_SETS[name][2] if name in NAMED_SETS else name
    name, config, split = hub_name.split(":")
    try:
        rows = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(f"hub data set {name} ({config}, {split}) could not be loaded: "
                          f"{in_short(error)}. Set data.dir to a folder with the files, or give a "
                          "path.") from error
    yield from ((f"{name}: row {i}", row) for i, row in enumerate(rows))


def generate_sums(name: str) -> Rows:
    """Generate the set "sums-SEED": SUMS problems of 2 to 7 numbers, which no text held before somebody chose
    the seed. `level` counts the numbers."""
    draw = random.Random(name)
    for i in range(SUMS):
        total, term = 0, draw.randint(2, 99)
        text, level = f"{term}", 2 + i % 6
        for _ in range(level - 1):
            sign, number = draw.choice("+-+-*"), draw.randint(2, 99)
            text += f" {sign} {number}"
            if sign == "*":
                term *= number
            else:
                total, term = total + term, number if sign == "+" else -number
        row = {"question": f"Compute {text}.", "answer": str(total + term), "level": level}
        yield f"{name}: row {i}", row
