"""A list of results prints as a table and is a list in every other way."""

from __future__ import annotations

import copy
import pickle

from conserved.output.html import MOST
from conserved.output.result_list import ResultList


def _results(count: int) -> ResultList[int]:
    return ResultList(range(count), "entry", ("number", "square"), lambda n: (str(n), str(n * n)), "entries")


def test_a_list_prints_a_row_for_each_result() -> None:
    assert str(_results(3)).splitlines() == ["number  square", "0       0", "1       1", "2       4"]


def test_a_short_form_counts_the_results() -> None:
    assert [repr(_results(n)) for n in (0, 1, 1200)] == ["<no entries>", "<1 entry>", "<1,200 entries>"]


def test_an_empty_list_says_so() -> None:
    assert str(_results(0)) == "no entries"
    assert "no entries" in _results(0)._repr_html_()


def test_a_long_list_shows_its_beginning_and_counts_the_rest() -> None:
    results = _results(MOST + 5)
    assert str(results).splitlines()[-1] == "… and 5 more"
    assert len(str(results).splitlines()) == MOST + 2
    assert "… and 5 more" in results._repr_html_()


def test_markup_in_a_cell_is_escaped() -> None:
    results = ResultList(["<b>"], "name", ("name",), lambda name: (name,))
    assert "<b>" not in results._repr_html_()
    assert "&lt;b&gt;" in results._repr_html_()


def test_it_is_a_list() -> None:
    results = _results(3)
    assert results == [0, 1, 2]
    assert results[1:] == [1, 2]
    assert pickle.loads(pickle.dumps(results)) == [0, 1, 2]
    assert copy.deepcopy(results) == [0, 1, 2]
