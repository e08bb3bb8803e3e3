"""Flag over variable over file over default: what holds, who said it, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvant.errors import BadValue, ConfigError, UnknownName
from kvant.plan.options import Kind, option, options_of
from kvant.plan.settings import Settings, read_settings, refuse_unknown_variables


@dataclass(frozen=True, slots=True)
class Inner:
    body_bytes: int = option(7, "Bytes.", name="max_body_bytes", low=1, high=9)


@dataclass(frozen=True, slots=True)
class Table:
    text: str = option("t", "A text.")
    count: int | None = option(None, "A count.", low=0, aliases=("number",))
    seconds: float = option(1.5, "Seconds.", low=0.1)
    switch: bool = option(True, "A switch.")
    texts: tuple[str, ...] = option((), "Texts.")
    layers: tuple[str, ...] = option((), "Layers.", kind=Kind.LAYERS)
    size: str | None = option(None, "A size.", kind=Kind.SIZE)
    mapping: str | None = option(None, "An object.", kind=Kind.OBJECT)
    one_of: str = option("a", "A choice.", choices=("a", "b"))
    key: tuple[str, ...] = option((), "A key.", secret=True)
    port: int = option(1, "A port.")
    plain: int = 3
    inner: Inner = field(default_factory=Inner)


OPTIONS = options_of(Table)


def read(
    file: Path | None = None, environ: dict[str, str] | None = None, **given: object
) -> Settings:
    return read_settings(
        OPTIONS, given=given, by=lambda o: o.flag, environ=environ or {}, file=file
    )


def written(path: Path, text: str) -> Path:
    file = path / "kvant.yaml"
    file.write_text(text)
    return file


def test_without_a_value_an_option_has_its_default() -> None:
    assert read().build(Table) == Table()
    assert read().given == {}


def test_flag_beats_variable_beats_file_and_all_stay_visible(tmp_path: Path) -> None:
    file = written(tmp_path, "# a comment\ncount: 4\ntext: file\nmax-body-bytes: 3\n")
    settings = read(file, {"KVANT_COUNT": "8", "KVANT_TEXT": "variable"}, count=16)
    table = settings.build(Table)
    assert (table.count, table.text, table.inner.body_bytes) == (16, "variable", 3)
    assert [(said.value, said.by) for said in settings.given["count"]] == [
        (16, "--count"),
        (8, "KVANT_COUNT"),
        (4, f"{file}:2: count"),
    ]


def test_settings_travel_as_json_unchanged(tmp_path: Path) -> None:
    file = written(tmp_path, "seconds: 2\ntexts: [a, b]\nswitch: false\n")
    settings = read(file, {"KVANT_COUNT": "8"}, size=1024)
    assert msgspec.json.decode(msgspec.json.encode(settings), type=Settings) == settings


def test_every_kind_reads_alike_from_variable_and_file(tmp_path: Path) -> None:
    variables = {
        "text": "x y", "count": "12", "seconds": "0.5", "switch": "off", "texts": "a b",
        "layers": "0 -1", "size": "2GiB", "mapping": '{"a": 1}', "one_of": "b",
        "max_body_bytes": "9",
    }  # fmt: skip
    file = written(
        tmp_path,
        "text: x y\ncount: 12\nseconds: 0.5\nswitch: off\ntexts: [a, b]\nlayers: [0, -1]\n"
        "size: 2GiB\nmapping: {a: 1}\none-of: b\nmax_body_bytes: 9\n",
    )
    environ = {f"KVANT_{name.upper()}": text for name, text in variables.items()}
    assert read(None, environ).build(Table) == read(file).build(Table)
    assert read(file).build(Table).layers == ("0", "-1")


@pytest.mark.parametrize(
    ("line", "expects"),
    [
        ("count: many", "a whole number, 0 or more"),
        ("count: -1", "a whole number, 0 or more"),
        ("count: true", "a whole number"),
        ("count: 1.5", "a whole number"),
        ("count: [1]", "a whole number"),
        ("text: 12", "in quotes"),
        ("text: 2026-11-21", "in quotes"),
        ("seconds: .nan", "a number"),
        ("seconds: .inf", "a number"),
        ("seconds: 0.05", "0.1 or more"),
        (f"seconds: {10**400}", "a number"),
        ('switch: "yes"', "true or false"),
        ("texts: [a, 1]", "a list of texts"),
        ("texts: {a: b}", "a list of texts"),
        ("layers: [[0]]", "a list of layers"),
        ("size: true", "a size"),
        ("mapping: [1]", "a JSON object"),
        ("mapping: {a: 2026-11-21}", "a JSON object"),
        ("max_body_bytes: 10", "from 1 to 9"),
        ("one_of: c", "known names: a, b"),
    ],
)
def test_a_wrong_value_in_a_file_names_its_line(tmp_path: Path, line: str, expects: str) -> None:
    file = written(tmp_path, f"\n\n{line}\n")
    with pytest.raises(BadValue) as caught:
        read(file)
    assert f"{file}:3" in caught.value.what
    assert expects in caught.value.what


def test_all_faults_of_a_file_come_at_once(tmp_path: Path) -> None:
    file = written(tmp_path, "count: x\nport: 1\nport: 2\nseconds: y\n")
    with pytest.raises(BadValue) as caught:
        read(file)
    assert [line.split(": ")[0] for line in caught.value.what.splitlines()] == [
        f"{file}:{number}" for number in (1, 3, 4)
    ]


@pytest.mark.parametrize(
    "text",
    ["count: [", "- a\n- b", "just text", "a: &x 1\nb: *y", "count: !!python/name:os.system"],
)
def test_what_is_no_mapping_of_plain_values_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"kvant\.yaml"):
        read(written(tmp_path, text))


@pytest.mark.parametrize("text", ["", "# nothing\n", "count:\n", "count: null\n"])
def test_nothing_said_in_a_file_is_nothing(tmp_path: Path, text: str) -> None:
    assert read(written(tmp_path, text)).given == {}


def test_a_file_that_cannot_be_read_is_one_block(tmp_path: Path) -> None:
    with pytest.raises(BadValue, match="No such file"):
        read(tmp_path / "nowhere.yaml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadValue, match="not YAML"):
        read(tmp_path / "binary")


@pytest.mark.parametrize(
    ("variable", "text"),
    [("COUNT", "many"), ("COUNT", "1.0"), ("COUNT", ""), ("SECONDS", "soon"), ("SWITCH", "maybe")],
)
def test_a_wrong_variable_is_named(variable: str, text: str) -> None:
    with pytest.raises(BadValue, match=f"KVANT_{variable} is"):
        read(None, {f"KVANT_{variable}": text})


def test_unknown_names_suggest_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"kvant\.yaml:1\).*did you mean count"):
        read(written(tmp_path, "cuont: 1\n"))
    with pytest.raises(UnknownName, match="did you mean KVANT_COUNT"):
        refuse_unknown_variables(OPTIONS, {"KVANT_CUONT": "1"})
    with pytest.raises(UnknownName, match="did you mean count"):
        read(cuont=1)


def test_an_unknown_name_lists_the_known_ones_if_they_are_few_or_none_is_near() -> None:
    many = [f"option_{number}" for number in range(UnknownName.MOST_LISTED + 1)]
    assert "known names: " not in str(UnknownName("key", "option_x", many))
    assert "known names: " in str(UnknownName("key", "option_x", many[1:]))
    assert "known names: " in str(UnknownName("key", "%", many))


def test_all_faults_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadValue) as caught:
        read(written(tmp_path, "cuont: 1\ncount: many\nswitch: maybe\nswitch: true\n"))
    said = caught.value.what.splitlines()
    assert [line.partition("kvant.yaml:")[2][0] for line in said] == ["1", "2", "3", "4"], said
    assert "did you mean count" in said[0]


def test_other_peoples_variables_are_left_alone() -> None:
    mine = {"KVANT_COUNT": "1", "KVANT_NUMBER": "1", "KVANT_CACHE": "/x", "KVANT_CONFIG": "y"}
    links = {"KVANT_SERVICE_HOST": "10.0.0.1", "KVANT_SERVICE_PORT_HTTP": "80",
             "KVANT_PORT_8000_TCP_ADDR": "10.0.0.1"}  # fmt: skip
    refuse_unknown_variables(OPTIONS, {**mine, **links, "PATH": "/bin", "VLLM_PORT": "1"})
    with pytest.raises(BadValue, match="KVANT_PORT") as caught:
        read(None, {"KVANT_PORT": "tcp://10.0.0.1:8000"})
    assert "Kubernetes" in caught.value.why


def test_two_names_of_one_option_must_agree(tmp_path: Path) -> None:
    assert read(count=3, number=3).build(Table).count == 3
    with pytest.raises(BadValue, match="count and number differ"):
        read(count=3, number=4)
    with pytest.raises(BadValue, match="KVANT_COUNT and KVANT_NUMBER"):
        read(None, {"KVANT_COUNT": "1", "KVANT_NUMBER": "1"})
    with pytest.raises(BadValue, match="twice"):
        read(written(tmp_path, "count: 1\nnumber: 1\n"))


def test_a_secret_is_in_no_message(tmp_path: Path) -> None:
    with pytest.raises(BadValue) as caught:
        read(written(tmp_path, "key: 12345\n"))
    assert "12345" not in str(caught.value)


@given(st.text())
def test_no_text_in_a_variable_raises_anything_but_a_config_error(text: str) -> None:
    for each in OPTIONS:
        try:
            value = each.read_text(text, each.variable)
        except ConfigError:
            continue
        assert read(None, {each.variable: text}).given[each.name][0].value == value
