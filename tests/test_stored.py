"""Records in a file that ranks share: read as they were, made once a node, with the errors of who made them."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from conftest import TOY, toy_config
from test_invariance import on_ranks

import train
from config import ConfigError
from infra import dist
from infra.stored import Stored, once_a_node, store
from records import Prompt
from verify.errors import VerifyError

RECORDS = [Prompt(f"q{i}", tuple(range(i % 7)), "é" * i, {"row": i}) for i in range(50)]


def test_records_come_back_by_place_from_the_end_and_in_slices():
    with store(RECORDS) as file:
        stored = Stored(file.name)
    assert not Path(file.name).exists()  # what is mapped stays
    assert len(stored) == 50 and [*stored] == RECORDS and stored[-1] == RECORDS[-1] and stored[7].row == {"row": 7}
    assert stored[3:40:5] == RECORDS[3:40:5] and stored[:0] == []
    for place in (50, -51):
        with pytest.raises(IndexError):
            stored[place]
    assert pickle.loads(stored.bytes[:stored.ends[0]]) == RECORDS[0]


def load_on_rank(folder: str, size: int) -> tuple:
    """With `size` ranks a node; rank r would make r times ten records."""
    os.environ["LOCAL_RANK"] = str(dist.rank() % size)
    made = []

    def make():
        made.append(dist.rank())
        if size == 3:
            raise error(f"rank {dist.rank()} finds nothing")
        return [RECORDS[:10 * dist.rank() + 10], RECORDS[:1]], dist.rank()

    for error in (ConfigError, VerifyError, OSError):
        made.clear()
        try:
            (first, second), other = once_a_node(make)
            result = len(first), [*second] == RECORDS[:1], other, first[9] == RECORDS[9]
        except error as raised:
            result = str(raised)
    task = train.load_task(toy_config(Path(folder) / f"{dist.rank()}" / "run"))
    ids = [prompt.id for prompt in task.prompts]
    os.environ["LOCAL_RANK"] = "0"
    return made, result, len(ids), [problem.id for problem in task.problems] == ids


@pytest.mark.parametrize(("size", "made", "found"), [
    pytest.param(1, [[0], [1], [2]], [(10, True, 0, True), (20, True, 1, True), (30, True, 2, True)],
                 marks=pytest.mark.slow),
    pytest.param(2, [[0], [], [2], []], [(10, True, 0, True)] * 2 + [(30, True, 2, True)] * 2, marks=pytest.mark.slow),
    (3, [[0], [], []], ["rank 0 finds nothing"] * 3)])
def test_one_rank_of_a_node_loads_for_all(size, made, found, tmp_path):
    ranks = on_ranks(len(made), tmp_path, load_on_rank, str(tmp_path), size)
    assert [rank[0] for rank in ranks] == made and [rank[1] for rank in ranks] == found
    assert all(rank[2:] == (256, True) for rank in ranks)


def test_a_task_is_read_where_it_is_asked_for(tmp_path):
    task = train.load_task(toy_config(tmp_path / "run"))
    assert isinstance(task.prompts, Stored) and isinstance(task.problems, Stored) and task.source == TOY
    assert task.prompts[3] == task.prompts[3] and task.prompts[3] is not task.prompts[3]
    assert task.prompts[5].row == task.problems[5].row and torch.tensor(task.prompts[5].ids).min() >= 0
