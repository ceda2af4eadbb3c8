"""Every known mistake, under every scheme that it can be made in: one exact message, and a correction that passes."""

from __future__ import annotations

from collections import Counter

import pytest

from kvarto.cluster.check import check, correct
from kvarto.cluster.schemes import SCHEMES
from kvarto.cluster.yaml_text import dump_all, load_all
from tests.cluster.manifests import OPTIONS, as_cron_job, as_list, as_pod, correct_manifests, plain
from tests.cluster.mistakes import Mistake, all_mistakes

MISTAKES = all_mistakes()


def test_there_are_three_hundred_of_them() -> None:
    assert len(MISTAKES) >= 300
    assert [name for name, count in Counter(mistake.id for mistake in MISTAKES).items() if count > 1] == []


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.id)
def test_a_mistake_is_named_once_and_its_correction_passes(mistake: Mistake) -> None:
    wrong = mistake.wrong()
    findings = check(wrong, OPTIONS)
    assert [finding.message for finding in findings] == [mistake.message]
    assert findings[0].rule == mistake.rule
    fixed, left = correct(wrong, OPTIONS)
    assert left == []
    assert plain(fixed) == plain(mistake.corrected())
    assert plain(wrong) == plain(mistake.wrong()), "the caller's documents are left alone"


@pytest.mark.parametrize("mistake", MISTAKES[::12], ids=lambda mistake: mistake.id)
def test_a_correction_holds_once_it_was_written_and_read(mistake: Mistake) -> None:
    fixed, _ = correct(load_all(dump_all(mistake.wrong())), OPTIONS)
    assert check(load_all(dump_all(fixed)), OPTIONS) == []
    assert plain(fixed) == plain(mistake.corrected())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("carrier", [list, as_pod, as_cron_job, as_list])
def test_correct_manifests_pass_whatever_makes_the_pod(scheme: str, carrier: object) -> None:
    assert callable(carrier)
    assert check(carrier(correct_manifests(scheme)), OPTIONS) == []
