"""The prompt forms of fill-in-the-middle (FIM): asking a model for the text between two others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class FillForm:
    """A model's FIM marks, each one token: before the first text, between the two, and after the second.

    suffix_first: the text after the gap comes first. repository, file: marks before the names of a project
    and of its files; empty if the model has none.
    """

    marks: tuple[str, str, str]
    suffix_first: bool = False
    repository: str = ""
    file: str = ""

    def prompt(self, prefix: str, suffix: str, files: Sequence[tuple[str, str]] = ()) -> str:
        """Returns the prompt for the text between prefix and suffix.

        files: names and texts of other files, which come first.
        """
        begin, between, end = self.marks
        first, second = (suffix, prefix) if self.suffix_first else (prefix, suffix)
        return f"{self._context(files)}{begin}{first}{between}{second}{end}"

    def _context(self, files: Sequence[tuple[str, str]]) -> str:
        head = f"{self.repository}project\n" if files and self.repository else ""
        texts = [f"{self.file}{name}\n{_ended(text)}" for name, text in files]
        # The gap lies in another file of the project. Its name is unknown, so it is called "file".
        own = f"{self.file}file\n" if files and self.file else ""
        return "".join((head, *texts, own))


def _ended(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


_BAR = "\N{FULLWIDTH VERTICAL LINE}"
_FORMS = (
    FillForm(  # Qwen Coder; CodeGemma has the first three
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        repository="<|repo_name|>",
        file="<|file_sep|>",
    ),
    FillForm(  # StarCoder 2; Granite has the first three
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        repository="<repo_name>",
        file="<file_sep>",
    ),
    FillForm(  # DeepSeek Coder
        (
            f"<{_BAR}fim\u2581begin{_BAR}>",
            f"<{_BAR}fim\u2581hole{_BAR}>",
            f"<{_BAR}fim\u2581end{_BAR}>",
        )
    ),
    FillForm(("[SUFFIX]", "[PREFIX]", ""), suffix_first=True),  # Codestral
)


def fill_form(has_token: Callable[[str], bool]) -> FillForm | None:
    """Returns the FIM form of a model; None if it has no such marks.

    has_token: returns whether a text is one token of the model.
    """
    for form in _FORMS:
        if all(has_token(mark) for mark in form.marks if mark):
            named = bool(form.file) and has_token(form.repository) and has_token(form.file)
            return form if named else replace(form, repository="", file="")
    return None


class IndentedText:
    """Text that ends before the first later line with less indentation than `least`; blank lines pass."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._line = (
            -1
        )  # where the first line ends that is not yet judged; -1: still in the first line
        self._shown = 0
        self.text = ""
        self.is_over = False

    def feed(self, more: str) -> str:
        """Adds text. Returns the text that can be shown now."""
        if self.is_over:
            return ""
        self.text += more
        safe = self._judge() if self._least else len(self.text)
        shown, self._shown = self.text[self._shown : safe], safe
        return shown

    def finish(self) -> str:
        """Ends the text. Returns the text that was held back."""
        rest = "" if self.is_over else self.text[self._shown :]
        self._shown = len(self.text)
        return rest

    def _judge(self) -> int:
        """Returns the length of the text that can be shown now, and cuts the text at a line that ends it."""
        if self._line < 0:
            self._line = self.text.find("\n")
        while self._line >= 0:
            line, newline, _ = self.text[self._line + 1 :].partition("\n")
            body = line.lstrip(" \t")
            if body and len(line) - len(body) < self._least:
                self.is_over = True
                self.text = self.text[: self._line]
                return self._line
            if not newline:
                return len(self.text) if body else self._line
            self._line += 1 + len(line)
        return len(self.text)
