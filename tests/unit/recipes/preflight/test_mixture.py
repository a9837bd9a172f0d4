"""What a mixture may not say: one line with the number of the entry."""

from pathlib import Path

import pytest

from recipes.config.mixture import mixture_names
from recipes.data.tokens import Tokenizer
from recipes.parallel.agreement import settings_and_code
from recipes.planner.report import toml_text
from recipes.preflight import load_config
from tests import ROOT
from tests.helpers.documents import write_jsonl, write_prepared

CPU = (ROOT / "train_configs/debug_cpu.toml").read_text().replace('dataset = "sample"\n', "", 1)
TWO = '[[training.mixture]]\n{}\n[[training.mixture]]\nname = "second"\n{}\n'


def load(tmp_path: Path, text: str, *args: str, world_size: int | None = None):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return load_config(["--job.config_file", str(path), *args], world_size)


def message(tmp_path: Path, text: str, *args: str, world_size: int | None = None) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (every test looks at the text)
        load(tmp_path, text, *args, world_size=world_size)
    text = str(caught.value)
    assert "\n" not in text
    assert "; allowed: " in text
    return text


def test_entries_and_their_names(tmp_path: Path) -> None:
    entries = (
        "",
        'dataset = "local"\ndataset_path = "data/books/*.jsonl.gz"\nweight = 3',
        'dataset = "local"\ndataset_path = ["prepared/code", "more"]',
        'dataset = "owner/wiki"\ndataset_subset = "en"',
        'dataset = "local"\ndataset_path = "data/arxiv.jsonl"\nseq_len = 64',
        'name = "own.name-1"\nwhen_used_up = "stop"',
    )
    text = CPU + "".join(f"[[training.mixture]]\n{entry}\n" for entry in entries)
    config = load(tmp_path, text, "--training.steps", "3")
    assert mixture_names(config) == ["sample", "books", "code", "wiki", "arxiv", "own.name-1"]
    assert [entry.weight for entry in config.training.mixture] == [1.0, 3.0, 1.0, 1.0, 1.0, 1.0]
    assert type(config.training.mixture[1].weight) is float
    assert config.training.mixture[3].dataset_subset == "en"
    assert config.training.steps == 3


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (
            "wieght = 1",
            "training.mixture.2.wieght = 1: unknown key, did you mean training.mixture",
        ),
        ("wieght = 1", "allowed: the keys of [[training.mixture]], see"),
        ("steps = 1", "training.mixture.2.steps = 1: unknown key"),
        ('weight = "1"', 'training.mixture.2.weight = "1": wrong type or value'),
        ("weight = 0", "training.mixture.2.weight = 0.0: out of range; allowed: above 0"),
        (
            "weight = 1e101",
            "training.mixture.2.weight = 1e+101: out of range; allowed: above 0 and",
        ),
        ("weight = inf", "training.mixture.2.weight = Infinity: out of range"),
        ("min_tokens = 0", "training.mixture.2.min_tokens = 0: out of range; allowed: at least 1"),
        ("min_tokens = 9\nmax_tokens = 8", "training.mixture.2.min_tokens = 9: no document is so"),
        ("seq_len = 4096", "training.mixture.2.seq_len = 4096: longer than training.seq_len"),
        ('when_used_up = "end"', 'training.mixture.2.when_used_up = "end": wrong type or value'),
        (
            'text_column = ""',
            'training.mixture.2.text_column = "": out of range; allowed: not',
        ),
        ("dataset_path = []", "training.mixture.2.dataset_path = []: out of range; allowed: not"),
        ('dataset_path = [""]', 'dataset_path = [""]: out of range; allowed: not empty'),
    ],
)
def test_wrong_entries(tmp_path: Path, second: str, expected: str) -> None:
    text = message(tmp_path, CPU + TWO.format("", second))
    assert text.startswith(f"{tmp_path / 'run.toml'}: training.mixture.2.")
    assert expected in text


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (TWO.format('name = "second"', ""), "training.mixture.1 has the same name"),
        (TWO.format('name = "a/b"', ""), 'training.mixture.1.name = "a/b": names a metric'),
        (TWO.format(*['when_used_up = "stop"'] * 2), "every source stops"),
        ("[training]\nmixture = 5\n", "training.mixture = 5: wrong type; allowed: tables [["),
        ("[training]\nmixture = [5]\n", "training.mixture = [5]: wrong type; allowed: tables [["),
        ("[training.mixture]\nweight = 5\n", "wrong type; allowed: tables [[training.mixture]]"),
        ('[training]\ndataset = "sample"\n' + TWO.format("", ""), 'training.dataset = "sample": '),
        ('[training]\nmixture_packing = "across"\n', "training.mixture has 0 sources"),
    ],
)
def test_wrong_mixtures(tmp_path: Path, entries: str, expected: str) -> None:
    assert expected in message(tmp_path, entries)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--training.mixture", "5"], "training.mixture = "),
        (["--training.mixture.1.weight", "5"], "stands in a file only"),
        (["--training.dataset_path", "x"], "training.mixture names the sources"),
        (["--training.text_column=text"], "training.mixture names the sources"),
    ],
)
def test_the_command_line_has_no_mixture(tmp_path: Path, args: list[str], expected: str) -> None:
    text = message(tmp_path, CPU + TWO.format("", ""), *args)
    assert text.startswith("command line: ")
    assert expected in text


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """Documents of 5, 6 and 7 tokens."""
    tokenizer = Tokenizer(str(ROOT / "assets/tokenizer"))
    return write_prepared(tmp_path / "prepared", tokenizer, [range(5), range(6), range(7)])


def test_every_source_is_looked_into(tmp_path: Path, prepared: Path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    bad = write_jsonl(tmp_path / "bad.jsonl", ["a", "b"], column="body")
    few = write_jsonl(tmp_path / "few.jsonl", ["a"])
    for entry, expected in (
        ('dataset = "local"', "training.mixture.2.dataset_path = null"),
        ('dataset = "local"\ndataset_path = "no/where"', "no/where: no such file"),
        (f'dataset = "local"\ndataset_path = "{bad}"', "bad.jsonl, line 1: column 'text' is"),
        (f'dataset = "local"\ndataset_path = "{prepared}"\nmin_tokens = 8', "leaves out every"),
        (f'dataset = "local"\ndataset_path = "{prepared}"\nmax_tokens = 4', "mixture.2.max_tokens"),
        (f'dataset = "local"\ndataset_path = "{prepared}"\ntext_column = "x"', "is prepared"),
        ('dataset = "sample"\ndataset_split = "x"', "training.mixture.2.dataset_split"),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            load(tmp_path, CPU + TWO.format("", entry), world_size=2)
        assert expected in str(caught.value)
        assert "\n" not in str(caught.value)
    good = f'dataset = "local"\ndataset_path = "{prepared}"\nmin_tokens = 7'
    load(tmp_path, CPU + TWO.format("", good), world_size=2)
    seed = ("--documents.shuffle_seed", "1")
    assert "training.mixture.1 has others" in message(
        tmp_path, CPU + TWO.format("", good), *seed, world_size=2
    )
    one_document = CPU + TWO.format("", f'dataset = "local"\ndataset_path = "{few}"')
    with pytest.raises(ValueError, match=r"training\.mixture\.2\.dataset: 1 documents are too few"):
        load(tmp_path, one_document, "--parallelism.context_parallel_degree", "1", world_size=2)


def test_paths_may_differ_between_hosts_and_nothing_else(tmp_path: Path) -> None:
    entries = 'dataset = "local"\ndataset_path = "{}"', 'dataset = "local"\nweight = {}'
    text = CPU + TWO.format(*entries)
    here, there, other = (
        settings_and_code(load(tmp_path, text.format(path, weight)))
        for path, weight in (("a/books", 1), ("b/books", 1), ("a/books", 2))
    )
    assert here == there
    assert {key for key in here if here[key] != other[key]} == {"training.mixture.2.weight"}


def test_a_mixture_is_written_as_it_was_read(tmp_path: Path) -> None:
    """As plan.py --write does."""
    mixture = [{"weight": 0.5, "dataset_path": ["a", "b"]}, {}, {"name": "c"}]
    table = {"training": {"steps": 3, "mixture": mixture}, "documents": {"mask": True}}
    read = load(tmp_path, toml_text(table, "x")).training
    assert [entry.weight for entry in read.mixture] == [0.5, 1.0, 1.0]
    assert read.mixture[0].dataset_path == ["a", "b"]
    assert read.mixture[2].name == "c"
    assert read.steps == 3
