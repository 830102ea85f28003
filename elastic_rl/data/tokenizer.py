"""The character-level tokenizer of the built-in tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # every process of a run encodes; importing transformers for it would cost each some seconds
    from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
PAD_ID, EOS_ID = 0, 1
CHARACTERS = "0123456789+="
VOCABULARY: dict[str, int] = {token: i for i, token in enumerate([PAD, EOS, *CHARACTERS, UNKNOWN])}
# A multiple of 16, so that it splits over any power of two of tensor-parallel ranks up to 16; ids above the vocabulary
# are unused.
VOCAB_SIZE = 16


def encode(text: str) -> list[int]:
    """Token ids of a text, one per character. Raises KeyError for a character outside the vocabulary."""
    return [VOCABULARY[c] for c in text]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of ``CHARACTERS``; ids equal those of ``encode``. Engines read what ``save_pretrained``
    writes."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN,
                                   clean_up_tokenization_spaces=False)
