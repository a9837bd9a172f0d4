"""Whatever a file holds, there is a message or a result, never another kind of failure."""

import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipes.config.schema import StripedJobConfig
from recipes.config.types import InvalidSetting, check_table
from recipes.data.readers import SUFFIXES, read_records
from recipes.data.records import BadDocument
from recipes.preflight import load_config

SECTIONS = ("training", "parallelism", "striped_cp", "checkpoint", "rope", "optimizer", "new")
KEYS = (
    "seq_len",
    "steps",
    "context_parallel_degree",
    "folder",
    "theta",
    "lr",
    "enable",
    "mixture",
    "x-y",
)
FUZZ = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

scalars = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.none(),
    st.dates(),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
tables = st.dictionaries(st.sampled_from(SECTIONS), st.dictionaries(st.sampled_from(KEYS), values))
toml_values = st.one_of(
    st.booleans().map(lambda b: str(b).lower()),
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(str),
    st.text(max_size=10).map(lambda t: repr(t)),
    st.sampled_from(["1e400", "0x10", "[]", "{}", "2024-01-01", "'''", '"\\ud800"', "inf"]),
)
toml_lines = st.one_of(
    st.sampled_from(SECTIONS).map(lambda s: f"[{s}]"),
    st.tuples(st.sampled_from(KEYS), toml_values).map(" = ".join),
    st.text(max_size=20),
)


def check_message(error: ValueError, begins: str) -> None:
    text = str(error)
    assert text.startswith(begins)
    assert "\n" not in text
    assert len(text) > len(begins) + 10


@FUZZ
@given(tables)
def test_any_table(table: dict) -> None:
    try:
        check_table(table, StripedJobConfig)
    except InvalidSetting as error:
        check_message(error, error.key)


@FUZZ
@given(st.lists(toml_lines, max_size=6).map("\n".join))
def test_any_file_of_settings(tmp_path: Path, text: str) -> None:
    recipe = tmp_path / "run.toml"
    recipe.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        config = load_config(["--job.config_file", str(recipe)])
    except ValueError as error:
        check_message(error, str(recipe))
    else:
        assert isinstance(config, StripedJobConfig)


@FUZZ
@given(st.binary(max_size=200))
def test_any_bytes_as_settings(tmp_path: Path, content: bytes) -> None:
    recipe = tmp_path / "run.toml"
    recipe.write_bytes(content)
    try:
        load_config(["--job.config_file", str(recipe)])
    except ValueError as error:
        check_message(error, str(recipe))


json_like = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=30).map(lambda t: ('{"text": "' + t + '"}').encode("utf-8", "surrogatepass")),
    st.sampled_from([b'{"text": 5}', b"[]", b"{", b'{"other": ""}', b"null", b'{"text": "a"}']),
)


@pytest.mark.parametrize("suffix", SUFFIXES)
@FUZZ
@given(lines=st.lists(json_like, max_size=4), cut=st.integers(0, 80), skip=st.integers(0, 5))
def test_any_documents(tmp_path: Path, suffix: str, lines: list, cut: int, skip: int) -> None:
    """Every record is a text or a BadDocument that names the file."""
    file = tmp_path / f"documents{suffix}"
    content = b"\n".join(lines)
    if suffix.endswith(".gz"):
        content = gzip.compress(content)[: cut + 20]
    file.write_bytes(content)
    for record in read_records(file, "text", skip):
        try:
            text = record.text()
        except BadDocument as error:
            check_message(error, str(file))
        else:
            assert text.strip()
