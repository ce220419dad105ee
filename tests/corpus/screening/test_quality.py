"""Rules of quality: the reason for which a text is dropped, or none."""

from __future__ import annotations

import pytest

from palm_ds.common.errors import UserError
from palm_ds.corpus.screening.quality import find_filter, gopher

GOOD = """The harbour of the old town lies to the north of the river. Ships have come here with
grain and timber since the ninth century, and the oldest of the warehouses still stands.

In winter the water freezes near the shore, so that fishermen walk out to their boats. They sell
what they catch on the quay, where visitors from inland wait for the first nets to arrive."""
CHINESE = (
    "北京是中华人民共和国的首都，也是全国的政治、文化中心。城市历史悠久，名胜古迹众多，"
    "每年吸引大量游客前来参观游览，并在胡同里品尝各种地方小吃。"
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (GOOD, ""),
        (CHINESE, ""),
        ("Too short to be kept.", "fewer than 50 words"),
        (CHINESE[:30], "fewer than 50 words"),
        ("word of the " * 40_000, "more than 100,000 words"),
        ("a b c of the " * 20, "words of less than 3 characters on average"),
        (
            "incomprehensibilities misunderstanding of " * 20,
            "words of more than 10 characters",
        ),
        (GOOD.replace(" ", " #", 20), "more than 1 symbol"),
        (GOOD + " 1234" * 40, "less than 80 % of the words have a letter"),
        ("kurze deutsche Texte ohne englische Wörter " * 10, "commonest English words"),
        (
            "\n".join(f"-the point {n} of this list to the end" for n in range(20)),
            "with a bullet",
        ),
        ("\n".join(f"The story {n} of this page has an end ..." for n in range(20)), "ellipsis"),
        (GOOD + "\nBuy it here today" * 4, "30 % of the lines are repeated"),
        (f"{GOOD}\n\n{GOOD}", "lines are repeated"),
        (f"{GOOD}\n\n{GOOD}".replace("\n\n", "|").replace("\n", " ").replace("|", "\n\n"), "rep"),
        (GOOD.replace("\n", " ") + " and so on and so on" * 9, "a run of"),
        (GOOD.replace("\n", " ") + " " + GOOD[70:190].replace("\n", " "), "repeated runs of"),
    ],
)
def test_gopher(text: str, reason: str) -> None:
    found = gopher(text)
    assert (reason in found) if reason else found == ""


def test_a_filter_is_a_name_or_a_function() -> None:
    assert find_filter("gopher") is gopher
    assert find_filter("builtins:str") is str
    with pytest.raises(UserError, match=r"--filter 'gofer': unknown; did you mean \"gopher\""):
        find_filter("gofer")
    with pytest.raises(UserError, match="--filter 'builtins:nothing'"):
        find_filter("builtins:nothing")
