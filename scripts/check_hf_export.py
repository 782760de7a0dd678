#!/usr/bin/env python3
"""Load an exported checkpoint with transformers and compare it with what biomoe says.

  check_hf_export.py CHECKPOINT_DIR [--logits FILE.safetensors] [--weights OTHER_CHECKPOINT_DIR] [--tolerance 1e-4]

--logits   a safetensors file with input_ids [B, S] (integers) and logits [B, S, V] (float32) that biomoe computed from the
           checkpoint; prints the largest absolute difference to those of transformers (float32, CPU, eager attention)
--weights  a second checkpoint, whose tensors must be equal to the first one's as transformers holds them

Exit status 1 when a tensor of either side is missing or a difference is above the tolerance.
"""
import argparse
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def load(folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    problems = {key: sorted(value) for key, value in info.items() if value}
    if problems:
        sys.exit(f"{folder}: transformers does not account for every tensor: {problems}")
    return model.float().eval()  # exact, whatever the stored type


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--logits")
    parser.add_argument("--weights")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    args = parser.parse_args()

    model = load(args.checkpoint)
    print(f"{args.checkpoint}: {type(model).__name__}, {model.num_parameters()} parameters")
    worst = 0.0
    if args.weights:
        ours, theirs = model.state_dict(), load(args.weights).state_dict()
        if ours.keys() != theirs.keys():
            sys.exit(f"the tensors differ: {sorted(ours.keys() ^ theirs.keys())[:5]}")
        difference = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
        print(f"largest difference of weights: {difference:g}")
        worst = max(worst, difference)
    if args.logits:
        dump = load_file(args.logits)
        with torch.no_grad():
            logits = model(input_ids=dump["input_ids"].long()).logits
        if logits.shape != dump["logits"].shape:
            sys.exit(f"logits: {tuple(logits.shape)} in transformers, {tuple(dump['logits'].shape)} in the dump")
        difference = float((logits - dump["logits"]).abs().max())
        print(f"largest difference of logits: {difference:g}")
        worst = max(worst, difference)
    if not worst <= args.tolerance:
        sys.exit(f"the difference {worst:g} is above {args.tolerance:g}")


if __name__ == "__main__":
    main()
