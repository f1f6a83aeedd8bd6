"""Generate text with a model from a bucket, which transformers loads through headrace: python generate.py URL [FOLDER]

With a folder, the same model is loaded from there as well, by transformers alone, and the tokens are compared.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import headrace


def main(url: str, folder: str | None = None) -> None:
    logging.disable_progress_bar()
    with headrace.patch() as patched:
        tokenizer = AutoTokenizer.from_pretrained(url)
        model = AutoModelForCausalLM.from_pretrained(url, dtype=torch.float32)
    print(patched.report)
    prompt = tokenizer("hello, world", return_tensors="pt", return_token_type_ids=False)
    tokens = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    print(tokens[0].tolist())
    if folder is not None:
        other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        same = torch.equal(other.generate(**prompt, max_new_tokens=16, do_sample=False), tokens)
        print("the same tokens as from the folder" if same else "OTHER TOKENS than from the folder")


if __name__ == "__main__":
    main(*sys.argv[1:])
