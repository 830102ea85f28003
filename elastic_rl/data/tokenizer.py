"""Texts as token ids: the seam ``Tokenizer``, and the character-level tokenizer of the built-in tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from elastic_rl.data.chat_rendering import Conversation
from elastic_rl.errors import ConfigError

if TYPE_CHECKING:  # every process of a run encodes; importing transformers for it would cost each some seconds
    from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
PAD_ID, EOS_ID = 0, 1
CHARACTERS = "0123456789+="
VOCABULARY: dict[str, int] = {token: i for i, token in enumerate([PAD, EOS, *CHARACTERS, UNKNOWN])}
_TOKENS = {i: token for token, i in VOCABULARY.items()}
# A multiple of 16, so that it splits over any power of two of tensor-parallel ranks up to 16; ids above the vocabulary
# are unused.
VOCAB_SIZE = 16
_TEXT_MODEL = ("set model.path to the folder of a model that knows text; make_model_dir in "
               "elastic_rl/data/tiny_model.py makes a small one with random weights for any tokenizer, as "
               "examples/make_assets.py does")


class Tokenizer(Protocol):
    """Texts as the token ids of one model, and back."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a response; the first ends an answer to imitate. Raises ConfigError where none is known."""

    @property
    def identity(self) -> str:
        """A digest that another tokenizer does not have."""

    @property
    def chat_template(self) -> str:
        """The text of its chat template; "" where it has none."""

    def encode_batch(self, texts: Sequence[str], *, special_tokens: bool) -> list[list[int]]:
        """The ids of each text. ``special_tokens``: with those that the model wants before a text, as one that begins
        it, and without those that end it: every text is to be continued. Raises ConfigError for a text that has none.
        """

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def apply_chat_templates(self, conversations: Sequence[Conversation]) -> list[str]:
        """The text of each conversation up to where the model is to answer. Raises ConfigError without a template, for
        one that passes the limits, and for messages that it refuses; PluginFailed when it cannot be rendered now."""


def encode(text: str) -> list[int]:
    """Token ids of a text, one per character. Raises KeyError for a character outside the vocabulary."""
    return [VOCABULARY[c] for c in text]


class CharacterTokenizer:
    """The built-in model's. It does not read the model's folder, which may not be made yet."""

    eos_ids = (EOS_ID,)
    chat_template = ""
    identity = f"characters {CHARACTERS}"

    def encode_batch(self, texts: Sequence[str], *, special_tokens: bool) -> list[list[int]]:
        """See ``Tokenizer``."""
        try:
            return [encode(text) for text in texts]
        except KeyError as e:
            raise ConfigError(f"the built-in model has no token for {e.args[0]!r}, only for the characters "
                              f"{CHARACTERS}", hint=_TEXT_MODEL) from e

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See ``Tokenizer``. An id that is no token of the vocabulary is left out."""
        tokens = [_TOKENS.get(i, "") for i in ids]
        return "".join(t for t in tokens if not (skip_special_tokens and t in (PAD, EOS, UNKNOWN)))

    def apply_chat_templates(self, conversations: Sequence[Conversation]) -> list[str]:
        """See ``Tokenizer``."""
        raise ConfigError("the built-in model's tokenizer has no chat template, and no tokens but for the characters "
                          f"{CHARACTERS}", hint=f"{_TEXT_MODEL}; for prompts of these characters alone set "
                          "data.options.apply_chat_template to false")


def make_tokenizer(vocabulary: Mapping[str, int] = VOCABULARY) -> PreTrainedTokenizerFast:
    """One token per character of the vocabulary, which also has ``PAD``, ``EOS`` and ``UNKNOWN``; by default that of
    ``encode``. Engines read what ``save_pretrained`` writes."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel(dict(vocabulary), unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN,
                                   clean_up_tokenization_spaces=False)
