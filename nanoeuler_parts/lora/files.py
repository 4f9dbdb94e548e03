"""Adapters as files, in the format of PEFT: a folder with adapter_config.json and
adapter_model.safetensors.

A run writes both, and beside them run.bin, from which it resumes: A and B in one flat buffer, the
moments of AdamW, and the state of the run.  Folders that PEFT has written are read, too, if they
change only the projections of PROJECTIONS.  The metadata of our adapter_model.safetensors, which
other programs ignore, hold the checksum of the base and the chat template of the training.
"""
import json
import math
import os
import pathlib
import re
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from bpe import need, note, read_bytes, reading, regular, UserError
from nanoeuler import aligned, Config, Params, Stack
from nanoeuler_parts.checkpoint.bundled import shown_name
from nanoeuler_parts.checkpoint.file import (
    ADAPTER_CONFIG as CONFIG, ADAPTER_FILES, adapter_at, begins_as_checkpoint, params_in, REFERENCE,
    sha256_of,
)
from nanoeuler_parts.checkpoint.state import State
from nanoeuler_parts.checkpoint.tensors import named
from nanoeuler_parts.files.printing import counted
from nanoeuler_parts.files.safetensors import (
    DTYPES, map_tensors, need_finite, need_whole, read_meta, write_tensors,
)
from nanoeuler_parts.files.texts import parse_json
from nanoeuler_parts.files.writing import replacing
from nanoeuler_parts.lora.adapter import (
    delta_of, Lora, MOST_RANK, n_entries, PROJECTIONS, sites_of, tensors_of,
)
from nanoeuler_parts.machine.numbers import from_bf16

RUN, WEIGHTS = ADAPTER_FILES
LOG = "run.jsonl"
FORMAT = "nanoeuler-lora"    # of run.bin, in its metadata
REMEDY = "free space or choose another --out"
NOT_ADAPTER = "name the folder of a LoRA adapter, as `sft --lora` or PEFT writes it"
DAMAGED = "restore the file, or use another adapter"
ITS_MODEL = "use the model that the adapter was made for"

class AdapterFile(NamedTuple):
    """An adapter that was read.  base_sha256: the checksum of its base, "" if PEFT has written it
    state: of the training, None if PEFT has written it"""
    lora: Lora
    flat: np.ndarray
    base_sha256: str
    state: State | None

# ---- names
def peft_name(layer, target, part):
    """The name of A or B of a projection in PEFT's file     part: A or B"""
    return f"base_model.model.model.layers.{layer}.{PROJECTIONS[target][1]}.lora_{part}.weight"

def peft_tensors(cfg, lora, flat):
    """{name in PEFT's file: view of the flat buffer} of the targets, layer by layer"""
    found = tensors_of(cfg, lora, flat)
    return {peft_name(l, name, part): x[l] for l in range(cfg.n_layer)
            for name, pair in found.items() for part, x in zip("AB", pair)}

def checksum_of(file):
    """The checksum in a checkpoint's header, by which an adapter knows its base"""
    return read_meta(file).get("sha256", "")

# ---- writing
def need_plain_files(folder):
    """Rejects links and devices in place of the files that a run writes into its folder.  Another
    program may have made the folder, and a file is replaced where its link leads."""
    for name in (CONFIG, WEIGHTS, RUN, LOG):
        path = os.path.join(folder, name)
        is_plain = not os.path.islink(path) and (not os.path.exists(path) or os.path.isfile(path))
        need(is_plain, f"{path} is a link, or not a regular file, so nothing is written there; "
             f"remove it, or choose another --out")

def write_adapter(folder, cfg, lora, flat, state, base_sha256):
    """Writes adapter_model.safetensors and adapter_config.json."""
    need_plain_files(folder)
    meta = {"format": "pt", "base_sha256": base_sha256, "state": json.dumps(state.written())}
    tensors = {name: np.ascontiguousarray(x, "<f4")
               for name, x in peft_tensors(cfg, lora, flat).items()}
    write_tensors(os.path.join(folder, WEIGHTS), meta, tensors, REMEDY)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": lora.rank,
              "lora_alpha": lora.alpha, "lora_dropout": 0.0, "bias": "none",
              "target_modules": [PROJECTIONS[x][1].split(".")[1] for x in lora.targets],
              "fan_in_fan_out": False, "inference_mode": True, "use_rslora": False,
              "use_dora": False, "base_model_name_or_path": state.source}
    with replacing(os.path.join(folder, CONFIG), REMEDY) as temporary:
        pathlib.Path(temporary).write_text(json.dumps(config, indent=1), encoding="utf-8")

def write_run(path, cfg, lora, state, flat, moments, base_sha256):
    """Writes run.bin, from which a run resumes."""
    need_plain_files(os.path.dirname(path))
    meta = {"format": FORMAT, "config": json.dumps(cfg.written()),
            "lora": json.dumps(lora._asdict()), "state": json.dumps(state.written()),
            "base_sha256": base_sha256}
    names = "lora", "adamw.m", "adamw.v"
    tensors = {name: np.ascontiguousarray(x, "<f4") for name, x in zip(names, (flat, *moments))}
    if state.reference:
        tensors[REFERENCE] = np.array(state.reference, DTYPES["F64"])
    write_tensors(path, meta, tensors, REMEDY)

# ---- reading
# Entries of adapter_config.json that change the computation: the values that are computed here
COMPUTED = {"peft_type": ["LORA"], "bias": ["none", None], "use_dora": [False, None],
            "lora_bias": [False, None], "fan_in_fan_out": [False, None],
            "rank_pattern": [{}, None], "alpha_pattern": [{}, None],
            "modules_to_save": [[], None], "layer_replication": [None],
            "trainable_token_indices": [None], "target_parameters": [[], None],
            # an adapter that is active only after these tokens, and other forms of the product
            "alora_invocation_tokens": [None], "use_qalora": [False, None],
            "use_bdlora": [None, False], "arrow_config": [None], "monteclora_config": [None],
            "kasa_config": [None],
            # others, such as pissa, also change the base: their A and B belong to another W
            "init_lora_weights": [True, False, "gaussian", "orthogonal", "eva", "mica", None]}

def need_folder(folder):
    """Rejects what is no folder of an adapter, such as a model."""
    if os.path.isfile(os.path.join(folder, CONFIG)):
        return
    found, remedy = "none", NOT_ADAPTER
    if adapter_at(folder):
        found, remedy = "a file in it", f"name {adapter_at(folder)}"
    elif os.path.isfile(folder) and begins_as_checkpoint(folder):
        found = "a model"
    elif os.path.isfile(os.path.join(folder, "config.json")):
        found = "a model in Hugging Face's format"
    raise UserError(f"{folder}: expected a folder with {CONFIG}, found {found}; {remedy}")

def config_in(folder):
    """The entries of adapter_config.json"""
    need_folder(folder)
    path = os.path.join(folder, CONFIG)
    with reading(path, DAMAGED):
        config = parse_json(read_bytes(path))
        need(isinstance(config, dict), f"expected an object, found {config!r:.40}")
    return config

def need_targets(folder, config, names):
    """Rejects a configuration whose target_modules leave out the module of a tensor, because PEFT
    would not apply that tensor.     names: of the tensors"""
    targets = config.get("target_modules")
    if not isinstance(targets, list):        # PEFT also takes a regular expression, or none
        return
    found = {x for x in targets if isinstance(x, str)}
    with reading(os.path.join(folder, CONFIG), DAMAGED):
        for name in names:
            module = name.removeprefix("base_model.model.").partition(".lora_")[0]
            parts = module.split(".")[-8:]   # an entry is a module's whole path, or its end
            need(any(".".join(parts[i:]) in found for i in range(len(parts))), f"its "
                 f"target_modules do not include {module:.100}, which {WEIGHTS} changes")

def settings_in(folder, config):
    """(rank, alpha) of a configuration.  With use_rslora, s = alpha / sqrt(r), for which
    alpha sqrt(r) is returned."""
    with reading(os.path.join(folder, CONFIG), DAMAGED):
        for name, values in COMPUTED.items():
            found = config.get(name)
            need(found in values, f"its {name} is {found!r:.40}, expected {values[0]!r}")
        rank, alpha = config.get("r"), config.get("lora_alpha")
        need(type(rank) is int and 0 < rank <= MOST_RANK,
             f"its r is {rank!r:.40}, expected a whole number from 1 to {MOST_RANK}")
        need(type(alpha) in (int, float) and math.isfinite(alpha) and 0 < alpha <= 1e6,
             f"its lora_alpha is {alpha!r:.40}, expected a number above 0, at most 1000000")
        rslora = config.get("use_rslora") or False
        need(type(rslora) is bool, f"its use_rslora is {rslora!r:.40}, expected true or false")
    return rank, float(alpha) * (math.sqrt(rank) if rslora else 1.0)

def base_name(config):
    """The name of the model in a configuration, "" if there is none"""
    base = config.get("base_model_name_or_path")
    return base[:300] if isinstance(base, str) else ""

def need_layers(config, path, meta, tensors, cfg):
    """Rejects an adapter for a model with another number of layers.  PEFT may leave layers out;
    our own adapters, which have a state, have all."""
    found = [re.search(r"\.layers\.(\d{1,6})\.", name) for name in tensors]
    n = 1 + max((int(x[1]) for x in found if x), default=0)
    is_whole, base = "state" in meta, base_name(config)
    need(n <= cfg.n_layer and (n == cfg.n_layer or not is_whole), f"{path} was made for a model "
         f"with {'' if is_whole else 'at least '}{counted(n, 'layer')}{f', {base}' if base else ''}"
         f", this model has {cfg.n_layer}; {ITS_MODEL}")

def read_adapter(folder, cfg):
    """The AdapterFile of a folder, for a model of this shape.  Every name, shape and number is
    checked.  A layer that the file leaves out is not adapted."""
    config = config_in(folder)
    rank, alpha = settings_in(folder, config)
    path = os.path.join(folder, WEIGHTS)
    with reading(path, DAMAGED):
        need(os.path.exists(path), "the file is missing")
        need(os.path.isfile(path), "expected a regular file")
        meta, tensors = map_tensors(path, ("F32", "F16", "BF16"))
        need(tensors, "it has no tensors")
    need_layers(config, path, meta, tensors, cfg)
    with reading(path, f"{ITS_MODEL}, or another adapter"):
        place = {peft_name(l, name, part): name for l in range(cfg.n_layer)
                 for name in PROJECTIONS for part in "AB"}
        unknown = [name for name in tensors if name not in place]
        need(not unknown, f"it has the tensor {''.join(unknown[:1]):.100}, which is none of A and "
             f"B of the projections {', '.join(PROJECTIONS)} of {cfg.n_layer} layers")
        of_file = {place[name] for name in tensors}
        lora = Lora(rank, alpha, tuple(name for name in PROJECTIONS if name in of_file))
        flat = aligned((n_entries(cfg, rank),), np.float32)
        views = peft_tensors(cfg, lora, flat)
        for name, x in tensors.items():
            other = re.sub("lora_([AB])", lambda m: f"lora_{'AB'[m[1] == 'A']}", name)
            need(other in tensors, f"it has {name}, but no {other}")
            need(x.shape == views[name].shape, f"{name} has the shape {x.shape}, expected "
                 f"{views[name].shape}")
            need_whole(x)
            views[name][...] = from_bf16(np.ascontiguousarray(x))
            need_finite(name, views[name])
        state = None
        if "state" in meta and "base_sha256" in meta:
            state = state_in(meta)
    need_targets(folder, config, tensors)
    return AdapterFile(lora, flat, meta.get("base_sha256", ""), state)

class Summary(NamedTuple):
    """What the files of an adapter say, without its model"""
    lora: Lora
    parameters: int
    layers: int              # those that it changes
    base: str                # the name of its model, "" if there is none
    base_sha256: str         # the checksum of its model's file, "" if PEFT has written the adapter
    state: State | None
    has_checksum: bool       # PEFT's files have none

def summary_of(folder):
    """The Summary of a folder.  Tensors are only counted: `read_adapter` checks their shapes."""
    config = config_in(folder)
    rank, alpha = settings_in(folder, config)
    path = os.path.join(folder, WEIGHTS)
    with reading(path, DAMAGED):
        meta, tensors = map_tensors(path, ("F32", "F16", "BF16"))
        layers = {name.split(".")[4] for name in tensors if name.count(".") > 4}
        targets = tuple(target for target, (_, name) in PROJECTIONS.items()
                        if any(f".{name}.lora_" in tensor for tensor in tensors))
        state = state_in(meta) if "state" in meta else None
    need_targets(folder, config, tensors)
    return Summary(Lora(rank, alpha, targets), sum(x.size for x in tensors.values()), len(layers),
                   base_name(config), meta.get("base_sha256", ""), state,
                   "sha256" in meta)

def state_in(meta):
    values = json.loads(meta["state"])
    need(isinstance(values, dict), f"its state is {values!r:.40}, expected an object")
    try:
        return State(**values).check()
    except TypeError:
        raise UserError("its state has entries that no run has") from None

class RunFile(NamedTuple):
    """The content of run.bin"""
    cfg: Config
    lora: Lora
    state: State
    flat: np.ndarray
    moments: tuple
    base_sha256: str

def is_run(path):
    """Does the file begin as a run.bin?"""
    try:
        with open(path, "rb", opener=regular) as f:
            return f'{{"__metadata__":{{"format":"{FORMAT}"'.encode() in f.read(64)
    except (OSError, UserError):             # no file, or a pipe
        return False

def read_run(path):
    """The RunFile of a path"""
    with reading(path, "name the folder of a run of `sft --lora`"):
        meta, tensors = map_tensors(path, ("F32", "F64"))
        need(meta.get("format") == FORMAT, "expected a run with LoRA")
        need("sha256" in meta, "it has no checksum; the file is damaged")
        try:
            cfg = Config(**json.loads(meta["config"])).check()
            lora = Lora(**json.loads(meta["lora"]))
        except TypeError:
            raise UserError("its settings have entries that no run has") from None
        lora = lora._replace(targets=tuple(lora.targets))
        state, n = state_in(meta), n_entries(cfg, lora.rank)
        if REFERENCE in tensors:
            state.reference = tensors[REFERENCE].tolist()
        arrays = []
        for name in ("lora", "adamw.m", "adamw.v"):
            need(name in tensors and tensors[name].shape == (n,), f"expected {n:,} numbers in "
                 f"{name}; the file is damaged")
            need_finite(name, tensors[name])
            found = aligned((n,), np.float32)
            found[:] = tensors[name]
            arrays.append(found)
    return RunFile(cfg, lora, state, arrays[0], tuple(arrays[1:]), meta["base_sha256"])

def digest_of(folder):
    """SHA-256 of an adapter's two files"""
    return [sha256_of(os.path.join(folder, name)) for name in (CONFIG, WEIGHTS)]

# ---- a model with an adapter
def state_with(state, adapter):
    """The State of a model with an adapter: its kind and template are those of the training."""
    own = adapter.state
    if own is None:
        return state
    return replace(state, kind=own.kind, template=own.template, bos=own.bos, eos=own.eos,
                   stops=own.stops, thinking=own.thinking)

def adapter_for(folder, cfg, file):
    """The AdapterFile of a folder, for the model in a file.  A note says if its base was another
    file: the same model in another format is a good base, any other model is not."""
    adapter = read_adapter(folder, cfg)
    if adapter.base_sha256 and adapter.base_sha256 != checksum_of(file):
        note(f"{folder} was trained on another file than {shown_name(file)}, which works only "
             f"if both are the same model, in two formats; with any other model, such as one that "
             f"the adapter is merged into already, the answers may be senseless")
    return adapter

def adapted_params(c, adapter):
    """Params of an open checkpoint with W + s B A in place of W, each computed when it is read"""
    deltas, sites = tensors_of(c.cfg, *adapter[:2]), sites_of(c.cfg, adapter.lora.rank)

    def merged(read, name, l):
        def matrix():
            w = np.array(read(), np.float32)
            for target, (a, b) in deltas.items():
                if sites[target].matrix == name:
                    w[slice(*sites[target].rows)] += delta_of(a[l], b[l], adapter.lora.scale)
            need_finite(f"layer {l}, {name} with its adapter: ", w)
            return w
        return matrix

    found = params_in(c)._asdict()
    for name in {sites[target].matrix for target in deltas}:
        stack = found[name]
        readers = [merged(read, name, l) for l, read in enumerate(stack.readers)]
        found[name] = Stack(readers, stack.shape[1:])
    return Params(**found)

def merge_into(c, adapter):
    """The Checkpoint with W + s B A in place of W, in its own buffer"""
    tensors = named(c.cfg, c.flat)
    for target, (a, b) in tensors_of(c.cfg, *adapter[:2]).items():
        for l in range(c.cfg.n_layer):
            w = tensors[f"model.layers.{l}.{PROJECTIONS[target][1]}.weight"]
            w += delta_of(a[l], b[l], adapter.lora.scale)
            need_finite(f"layer {l}, {target} with its adapter: ", w)
    return c._replace(state=state_with(c.state, adapter), moments=())
