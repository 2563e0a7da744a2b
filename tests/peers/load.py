"""Import one implementation by name; importing has side effects on the others' speed."""

import importlib

import torch

MODULES = {
    "openv41": ("tests.peers.our_model", "OurModel"),
    "mlx-vlm": ("tests.peers.mlx_peer", "MlxPeer"),
    "nemo-automodel": ("tests.peers.nemo_peer", "NemoPeer"),
    "ftllm": ("tests.peers.ftllm_peer", "FtllmPeer"),  # speed only
}
PEERS = ("mlx-vlm", "nemo-automodel")
PARTS = {  # peers of one part: images, prompts
    "timm": "tests.peers.timm_peer",
    "deepseek-recipe": "tests.peers.recipe_peer",
}

if torch.version.cuda is None:
    # PyPI's torchvision, which timm and transformers import, has a compiled part that needs CUDA's
    # libraries. None of its operators is called, so declaring those it expects is enough.
    for _operator in ("nms", "qnms"):
        _inputs = "Tensor dets, Tensor scores, float iou_threshold"
        torch.library.define(f"torchvision::{_operator}", f"({_inputs}) -> Tensor")


def implementation(name):
    """Return (class, version, cases); raises whatever the import raises."""
    module = importlib.import_module(MODULES[name][0])
    return getattr(module, MODULES[name][1]), module.VERSION, module.CASES


def part_lines(name):
    """Return the function that yields a part's comparisons; raises whatever the import raises."""
    return importlib.import_module(PARTS[name]).lines
