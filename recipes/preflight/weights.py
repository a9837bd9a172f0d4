"""Startup checks of Hugging Face weights and of the tokenizer: before any process group exists."""

from pathlib import Path

from recipes.checkpoint.files import branch_goes_on, exported_steps, finished_steps, under_way
from recipes.config.schema import StripedJobConfig
from recipes.config.types import InvalidSetting
from recipes.data.tokens import Tokenizer
from recipes.models.decoder.args import model_args
from recipes.models.decoder.config_json import check_numbers, mismatch, model_fields
from recipes.models.decoder.rope_config import FIELDS, max_positions, read_rope
from recipes.models.decoder.weights import hf_shapes
from recipes.models.registry import MODELS, family_of, shape_of
from recipes.weights.folder import check_folder, read_json

# A model's vocabulary may be rounded up to a multiple of this.
_VOCABULARY_PADDING = 1024


def weights_folder(config: StripedJobConfig) -> Path:
    """Where Hugging Face weights are loaded from."""
    checkpoint = config.checkpoint
    if checkpoint.initial_load_path and checkpoint.initial_load_in_hf:
        return Path(checkpoint.initial_load_path)
    return Path(config.model.hf_assets_path)


def check_weights(config: StripedJobConfig) -> None:
    """Check tokenizer, Hugging Face folder and checkpoint settings; RoPE may be taken over.

    With `rope.on_mismatch` = "take" the fields of `config.rope` become the file's.

    Raises:
        ValueError: one line that names the key or file and what is wrong.
    """
    _check_settings(config)
    loads = loads_hf(config)
    if loads:
        check_config_json(config)
        folder = weights_folder(config)
        check_folder(folder, {n: tuple(s) for n, s in hf_shapes(model_args(config)).items()})
    else:
        take_rope(config)  # a run that goes on needs them too
    _check_tokenizer(config, loads)


def check_config_json(config: StripedJobConfig) -> None:
    """Check the flavor and `[rope]` against config.json of the weights.

    Raises:
        ValueError: one line that names the key and what the file says.
    """
    _check_model(config, weights_folder(config))
    _check_rope(config)


def take_rope(config: StripedJobConfig) -> None:
    """Replace the RoPE settings by those of the weights' config.json, where that is asked for.

    Raises:
        ValueError: there is no such file, or `[rope]` cannot express what it says.
    """
    if config.rope.on_mismatch == "take":
        _check_rope(config)


def loads_hf(config: StripedJobConfig) -> bool:
    """Whether this run starts from Hugging Face weights: not when it goes on from its own."""
    checkpoint = config.checkpoint
    return checkpoint.enable and checkpoint.initial_load_in_hf and not under_way(config)


def _check_settings(config: StripedJobConfig) -> None:
    """What torchtitan 0.2.2 asserts late, only warns of, or ignores."""
    checkpoint = config.checkpoint
    for name, other in (
        ("initial_load_in_hf", "initial_load_model_only"),
        ("last_save_in_hf", "last_save_model_only"),
    ):
        if getattr(checkpoint, name) and not getattr(checkpoint, other):
            why = f"a Hugging Face folder holds weights only, and checkpoint.{name} is true"
            raise InvalidSetting(f"checkpoint.{other}", False, why, "true")
    if checkpoint.last_save_in_hf:
        if checkpoint.load_only:
            why = "nothing is saved while checkpoint.load_only is true"
            raise InvalidSetting("checkpoint.last_save_in_hf", True, why, "false")
        model_fields(family_of(config), shape_of(config))  # refuses what config.json cannot say
    _check_resume(config)


def _check_resume(config: StripedJobConfig) -> None:
    """A run whose last save was an export has nothing it could go on from at that step."""
    checkpoint = config.checkpoint
    folder = Path(config.job.dump_folder, checkpoint.folder)
    if not checkpoint.enable or not folder.is_dir():
        return
    native, exported = finished_steps(folder), exported_steps(folder)
    step = checkpoint.load_step
    if step == -1 or branch_goes_on(folder, step):
        step = max(native | exported, default=-1)
    if step in exported:
        allowed = f"one of {sorted(native)}" if native else "none: start with another dump_folder"
        why = f"{folder / f'step-{step}'} is an export to Hugging Face, with nothing to go on from"
        raise InvalidSetting("checkpoint.load_step", checkpoint.load_step, why, allowed)


def _check_model(config: StripedJobConfig, folder: Path) -> None:
    if not (folder / "config.json").is_file():
        own = config.checkpoint.initial_load_path
        key = "checkpoint.initial_load_path" if own else "model.hf_assets_path"
        allowed = "a folder of Hugging Face weights, as `hf download` makes it"
        raise InvalidSetting(key, str(folder), "there is no config.json", allowed)
    hf = read_json(folder / "config.json")
    check_numbers(hf, folder / "config.json")
    problem = mismatch(hf, family_of(config), shape_of(config))
    if problem is None:
        return
    fitting = [
        f'"{flavor}"' if name == config.model.name else f'"{flavor}" of model.name = "{name}"'
        for name, family in MODELS.items()
        for flavor, shape in family.flavors.items()
        if mismatch(hf, family, shape) is None
    ]
    allowed = ", ".join(fitting) or "no flavor fits these weights"
    why = f"{folder / 'config.json'} says {problem}"
    raise InvalidSetting("model.flavor", config.model.flavor, why, allowed)


def _check_rope(config: StripedJobConfig) -> None:
    """Compare `[rope]` with the file's, or take the file's."""
    rope, seq_len = config.rope, config.training.seq_len
    if rope.on_mismatch == "change":
        return
    path = weights_folder(config) / "config.json"
    hf = read_json(path)
    check_numbers(hf, path)
    try:
        theirs = read_rope(hf, rope, shape_of(config).head_dim, family_of(config).theta)
    except (AttributeError, TypeError):
        raise ValueError(f"{path}: its rope_parameters or rope_scaling cannot be read") from None
    except (KeyError, ValueError) as error:
        why = f"missing {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: {why}") from None
    if rope.on_mismatch == "take":
        config.rope = theirs
    else:
        for name in FIELDS[theirs.scaling]:
            ours, file = getattr(rope, name), getattr(theirs, name)
            if ours != file:
                allowed = (
                    'the same; or rope.on_mismatch = "take" (use the file\'s settings) or '
                    '"change" (train the weights to these)'
                )
                why = f"{path} says {file}"
                raise InvalidSetting(f"rope.{name}", ours, why, allowed)
    longest = max_positions(hf)
    if seq_len > longest and not rope.extrapolate:
        why = f"{path} says max_position_embeddings = {longest}"
        allowed = (
            f'at most {longest}; or rope.on_mismatch = "change" with settings for longer '
            "sequences, or rope.extrapolate = true"
        )
        raise InvalidSetting("training.seq_len", seq_len, why, allowed)


def _check_tokenizer(config: StripedJobConfig, loads_hf: bool) -> None:
    path, flavor = config.model.hf_assets_path, config.model.flavor
    try:
        size = Tokenizer(path).get_vocab_size()
    except Exception as error:  # the Rust library raises plain Exception, torchtitan several kinds
        why = f"no tokenizer can be read ({str(error).splitlines()[0]})"
        allowed = "a folder with tokenizer.json"
        raise InvalidSetting("model.hf_assets_path", path, why, allowed) from None
    room = shape_of(config).vocab_size
    # Without trained weights a small vocabulary is a choice; with them it is another model's.
    least = room - _VOCABULARY_PADDING + 1 if loads_hf and room > _VOCABULARY_PADDING else 1
    if not least <= size <= room:
        why = f"its tokenizer has {size} entries, flavor {flavor} has {room}"
        raise InvalidSetting("model.hf_assets_path", path, why, "the tokenizer of the model")
