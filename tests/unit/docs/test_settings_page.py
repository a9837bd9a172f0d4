"""docs/reference/settings.md is what the schema says today."""

import settings_page


def test_the_page_is_that_of_the_schema() -> None:
    assert settings_page.PAGE.read_text(encoding="utf-8") == settings_page.page(), (
        "python scripts/settings_page.py writes it anew"
    )
