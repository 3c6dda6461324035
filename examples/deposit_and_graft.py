"""Deposit a text's state, graft it under a question, and see that nothing changed.

python examples/deposit_and_graft.py --model smollm2 --repo file:///tmp/kvgraft-example TEXT_FILE "What is it about?"
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from engine_adapter import GraftSession, open_repository
from engine_adapter.demo_models import resolve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("question")
    parser.add_argument("--model", default="smollm2", help="a demo model's name, or a path or hub name")
    parser.add_argument("--repo", default="file:///tmp/kvgraft-example")
    arguments = parser.parse_args()

    path = resolve(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16").eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = arguments.text.read_text()

    with open_repository(arguments.repo) as repository, GraftSession(model, tokenizer, repository) as session:
        artifact = session.deposit(text, tag=arguments.text.stem, text=text)
        print(f"deposited {artifact.token_count} tokens, {artifact.total_bytes} bytes, as {artifact.id}")

        prompt = f"{text}\n\nQuestion: {arguments.question}\nAnswer:"
        grafted = session.prefill(prompt)
        fresh = session.prefill(prompt, graft=False)
        print(f"grafted {grafted.grafted_tokens} tokens, computed {grafted.computed_tokens}")
        print("logits equal, bit for bit:", bool((grafted.logits == fresh.logits).all()))
        print(session.generate(grafted, max_new_tokens=32).text)


if __name__ == "__main__":
    main()
