"""Trains Medusa heads for a model, on its own text: python training/medusa.py --text self_text.jsonl

Each head learns the target's own distribution over the draft vocabulary, which the hidden state of the token before
gives (knowledge distillation), along the tokens of the text. The target is frozen.
"""
