"""What a file of attacks may hold, and what is said where it holds something else."""

from __future__ import annotations

import pytest

from composer.errors import ConfigError
from envs.attacks.catalogue import load

HEAD = "family: x\npieces: {wrong: 'def f(): pass'}\nattacks:\n"
GOOD = (
    "  - {name: a, tries: t, place: apart, also: [exit], main: 'x; <<wrong>> <<mark>>', "
    "files: {<<wrong>>: <<wrong>>}}\n"
)


def test_pieces_are_put_in_and_what_is_made_anew_stays(tmp_path):
    (tmp_path / "mine.yaml").write_text(HEAD + GOOD)
    [attack] = load(tmp_path)
    assert (attack.family, attack.also, attack.main) == ("mine", ("exit",), "x; def f(): pass <<mark>>")
    assert attack.files == {"def f(): pass": "def f(): pass"}
    assert attack.with_pieces({"mark": "m"}).main == "x; def f(): pass m"


def test_the_published_ones_have_names_of_their_own_and_say_what_they_try():
    attacks = load()
    assert len(attacks) >= 150 and len({attack.name for attack in attacks}) == len(attacks)
    assert all(attack.tries and "<<wrong>>" not in attack.main for attack in attacks)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("attacks: 3", "no file of attacks"),
        ("- a", "it must hold family, pieces and attacks"),
        (HEAD + "  - {name: a, tries: t, place: nowhere}\n", "place='nowhere' must be one of apart, together"),
        (HEAD + "  - {name: a, tries: t, place: host, also: [host]}\n", "also='host' must be one of"),
        (HEAD + "  - {name: a, tries: t, place: host, live: no}\n", "live=False must be one of naive, sign, own"),
        (HEAD + "  - {name: a, tries: t, place: host, live: sign}\n", "it needs a `sign`"),
        (
            HEAD + "  - {name: a, tries: t, place: apart, files: {main.py: x}}\n",
            "main.py is given as `main`, not among",
        ),
        (HEAD + "  - {name: a, tries: t, place: apart, shel: x}\n", "unexpected keyword argument 'shel'"),
        (HEAD + GOOD + GOOD, "rename one"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, message):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match="mine.yaml") as error:
        load(tmp_path)
    assert message in str(error.value)


def test_a_folder_without_attacks(tmp_path):
    with pytest.raises(ConfigError, match="holds no \\*.yaml with attacks"):
        load(tmp_path)
