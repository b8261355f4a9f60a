import pytest
from composer_solution import call


@pytest.mark.parametrize(
    ("title", "slug"),
    [
        ("Crème  brûlée!", "creme-brulee"),
        ("Hello, World", "hello-world"),
        ("  --a--  ", "a"),
        ("Zürich 2026", "zurich-2026"),
        ("!!!", ""),
    ],
)
def test_slugs(title, slug):
    assert call("text.slugify", title) == slug
