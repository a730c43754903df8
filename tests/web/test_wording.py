"""How pages write the values of records."""

from __future__ import annotations

from typing import Any

import pytest

from everbeat.web.wording import progress_text


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        ({"stage": "pages", "fraction": 0.25, "message": "page 9"}, "pages 25% page 9"),
        ({"stage": "pages", "fraction": None, "message": ""}, "pages"),
        ({"stage": "hidden"}, "hidden"),
        ({"stage": 7}, '{"stage":7}'),
        (["a\x1b"], '["a\\u001b"]'),
    ],
)
def test_progress_of_a_certificate_is_words_and_any_other_value_is_json(progress: Any, text: str) -> None:
    assert progress_text(progress) == text
