"""Where a text is cut, and that nothing of it is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.speech.clauses import LONGEST, ClauseCutter

TEXTS = st.text(st.sampled_from("ab 1.2,3!?…;:—\n\t\"')。，！、：」” 你好é") | st.characters(), max_size=500)


def cut(*pieces: str) -> list[str]:
    cutter = ClauseCutter()
    return [clause for piece in pieces for clause in cutter.push(piece)] + cutter.finish()


@pytest.mark.parametrize(
    "clauses",
    [
        ["Hello there. ", "How are you?"],
        ["Well, this goes, ", "and so, I am told, does this long clause here, ", "and on."],
        ["He said: ", '"Go." She went on and on and on. ', "The end."],
        ["It costs 3.14 or 1,000.5 dollars. ", "At 12:30 it is 1,000,000."],
        ["Hi. How are you?"],
        ["Wait... ", "what?! No way, really."],
        ["A title\n\n", "The text."],
        ["你好，", "今天的天气很好，我们一起出去走走吧。", "好吗？", "走。"],
        ["他说：", "“我们现在走吧。”", "然后他就真的走了。"],
        ["一共是三万１，０００元，", "不多。"],
        ["No end"],
    ],
)
def test_ends_of_clauses(clauses: list[str]) -> None:
    assert cut("".join(clauses)) == clauses


def test_a_clause_leaves_when_the_next_one_begins() -> None:
    cutter = ClauseCutter()
    assert cutter.push("Of course. ") == []
    assert cutter.push("I") == ["Of course. "]
    assert cutter.finish() == ["I"] and cutter.finish() == []


def test_long_texts_are_cut_at_blanks_and_before_numbers() -> None:
    words = "word " * 100
    assert all(len(clause) <= LONGEST and clause.endswith(" ") for clause in cut(words))
    before = "x" * (LONGEST - 3)
    assert cut(before + "3.14159") == [before, "3.14159"]
    assert [len(clause) for clause in cut("9" * 450)] == [200, 200, 50]


@given(TEXTS, st.data())
def test_nothing_is_lost_however_the_text_comes(text: str, data: st.DataObject) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    clauses = cut(*pieces)
    assert "".join(clauses) == text
    assert clauses == cut(text)
    assert all(0 < len(clause) <= LONGEST for clause in clauses)


@given(
    st.lists(
        st.sampled_from(["3.14", "1,000", "12:30", "１，０００", "5", "so", "好", "。", "，", ". ", ", "]), max_size=80
    )
)
def test_numbers_stay_whole(parts: list[str]) -> None:
    text = " ".join(parts)
    place = 0
    for clause in cut(text):
        place += len(clause)
        inside = 1 < place < len(text) - 1 and text[place - 2].isdigit() and text[place].isdigit()
        assert not (inside and text[place - 1] in ".,:，")
        assert not (0 < place < len(text) and text[place - 1].isdigit() and text[place].isdigit())
