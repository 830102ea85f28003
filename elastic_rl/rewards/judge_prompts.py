"""Makes the prompts of a judge of what it is asked, by the tokenizer and the limits of its model."""

from __future__ import annotations

from pathlib import Path

from elastic_rl.config import PoolSettings
from elastic_rl.data.model_tokenizer import ModelTokenizer, without_control_tokens
from elastic_rl.errors import ConfigError, PluginFailed
from elastic_rl.models.arch import RESERVED_TOKENS, longest_sequence
from elastic_rl.rewards.judging import JudgeOptions, JudgeRequest, Question, questions


class JudgePrompts:
    """The prompts of one judge. Thread-safe; reads the tokenizer when it is first used."""

    def __init__(self, pool: PoolSettings) -> None:
        self.tokenizer = ModelTokenizer(pool.model_dir, date=pool.template_date)
        self._positions = longest_sequence(Path(pool.model_dir), pool.engine.max_total_tokens)

    def of(self, request: JudgeRequest) -> tuple[list[Question], list[list[int]]]:
        """The questions, and their token ids. Raises PluginFailed for a judge that cannot be asked."""
        options = request.options
        if self.longest(options) < 1:
            raise PluginFailed(f"the judge's answers of up to max_tokens={options.max_tokens} leave no room for a "
                               f"question: its engines take sequences of {self._positions} tokens",
                               hint="lower max_tokens, or raise engine.max_total_tokens of the judge's pool if its "
                               "model has more positions")
        try:
            asked = questions(request, self._plain)
            texts = self._prompts(options, [question.text for question in asked])
            return asked, self.tokenizer.encode_batch(texts, special_tokens=not options.chat_template)
        except ConfigError as e:
            raise PluginFailed(f"the judge cannot be asked: {e.message}", hint="check the model folder of its pool, "
                               "and chat_template, chat_template_options and system_prompt in the options of the "
                               "reward genrm") from e

    def longest(self, options: JudgeOptions) -> int:
        """Tokens of the longest prompt that the judge is asked."""
        return min(options.max_prompt_tokens, self._positions - options.max_tokens - RESERVED_TOKENS)

    def _prompts(self, options: JudgeOptions, texts: list[str]) -> list[str]:
        if not options.chat_template:
            return texts
        system = [{"role": "system", "content": options.system_prompt}] if options.system_prompt else []
        return self.tokenizer.apply_chat_templates([
            ([*system, {"role": "user", "content": text}], options.chat_template_options) for text in texts])

    def _plain(self, text: str) -> str:
        return without_control_tokens(text, self.tokenizer.control_tokens)
