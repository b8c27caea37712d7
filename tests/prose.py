"""Checks the English of the project: ``python tests/prose.py [PATH ...]`` prints each fault and fails if it found one.

It reads docstrings, comments, errors, messages of assertions, help texts and names of tests in Python, comments and texts in C++, comments of scripts and
Markdown pages. It checks three things: the first word of a docstring, the length of sentences, and a list of words to avoid. Code lines of
pages have a limit too, so that a browser shows them whole.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORDS_OF_A_SENTENCE = 30
CODE_COLUMNS = 76  # of a page, as wide as the site's column

# A docstring begins with a verb or a noun. These are neither.
FIRST_WORDS = frozenset(
    re.findall(
        r"\w+",
        "about above after against among around as at because before behind below beneath beside between beyond by during for from if in "
        "inside into like near of off on onto out outside over per since so than that there these this those through to toward towards "
        "under until unless up upon what when where which while who whom whose why how with within without nor and or but not",
    )
)

# Expression to avoid -> plain ones.
AVOID = {
    r"in the place of": "instead of",
    r"for ever": "forever, indefinitely",
    r"all the same": "still, nevertheless",
    r"but for": "except",
    r"anew": "again",
    r"likewise": "also, in the same way",
    r"in words": "with an error that says why",
    r"in vain": "for nothing, unused",
    r"so many": "the number itself",
    r"the like": "similar ones",
    r"may well": "can, may",
    r"save that": "except that",
    r"nobody's": "not reused, not owned",
    r"whose they are|who is to|for who|of whom": "name the owner or the caller",
    r"whence|(?:where|there|here)(?:of|in|by|upon|with)": "name the thing",
    r"he|him|his|she|her": "the user, the caller, they",
    r"is that of|are those of|is those of": "name the thing again",
}
AVOIDED = {re.compile(rf"\b(?:{expression})\b", re.IGNORECASE): plain for expression, plain in AVOID.items()}

# A statement does not begin with these: the clause that follows would be its subject.
SUBJECT_CLAUSES = re.compile(r"(?:Who|Whoever|What|Whatever|Whose)\b")


@dataclass(frozen=True)
class Text:
    """A piece of prose: ``kind`` is docstring, comment, error, help, name, page, heading (a question) or code."""

    line: int
    kind: str
    text: str


def plain(text: str) -> str:
    """``text`` with each code span, role, link and formula as one word, and without emphasis."""
    text = re.sub(r":\w+:`[^`]*`|``[^`]+``|`[^`]+`", "CODE", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"https?://\S+", "URL", text)
    return re.sub(r"\*\*|(?<!\w)[*_]|[*_](?!\w)", "", text)


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yields paragraphs, items of lists and entries of ``Args:`` with the number of their first line, from 0."""
    block: list[str] = []
    first = 0
    for number, line in enumerate([*text.splitlines(), ""]):
        is_item = re.match(
            r"\s*(?:[*\-+]|\d+[.)])\s+|\s*[`\w*]+(?:, [`\w*]+)*: |\s*(?:Args|Returns|Raises|Yields|Attributes|Shapes):$",
            line,
        )
        if block and (not line.strip() or is_item):
            yield first, " ".join(block)
            block = []
        if line.strip():
            if not block:
                first = number
            block.append(re.sub(r"^(?:[*\-+]|\d+[.)])\s+", "", line.strip()))


def sentences(paragraph: str) -> list[str]:
    text = plain(paragraph)
    text = re.sub(r"\b(e\.g|i\.e|cf|vs|et al|no|fig)\.", r"\1", text, flags=re.IGNORECASE)
    return [part for part in re.split(r"(?<=[.!?])[)\"'”]*\s+|:\s*$", text) if part.strip()]


def length(sentence: str) -> int:
    return sum(1 for word in sentence.split() if re.search(r"\w", word))


def faults(piece: Text) -> Iterator[tuple[int, str]]:
    """Yields the line and the description of each fault of one text."""
    if piece.kind == "code":
        if len(piece.text) > CODE_COLUMNS:
            yield piece.line, f"code of a page has {len(piece.text)} columns, expected at most {CODE_COLUMNS}"
        return
    if piece.kind in ("docstring", "heading"):
        opening = next(iter(paragraphs(piece.text)), (0, ""))[1]
        first = re.match(r"\W*(\w+)", opening)
        if first and first[1].lower() in FIRST_WORDS and not opening.startswith("`"):
            yield piece.line, f"{piece.kind} begins with {first[1]!r}, expected a verb or a noun: {opening[:70]!r}"
        if sentences(opening) and sentences(opening)[0].rstrip().endswith("?"):
            yield piece.line, f"{piece.kind} is a question, expected a statement: {opening[:70]!r}"
    for offset, paragraph in paragraphs(piece.text):
        line = piece.line + offset
        text = plain(paragraph)
        for pattern, better in AVOIDED.items():
            if found := pattern.search(text):
                yield line, f"{piece.kind}: {found[0]!r} (better: {better}): {around(text, found)}"
        for sentence in sentences(paragraph):
            for clause in sentence.split("; ") if piece.kind in ("error", "help") else [sentence]:
                if length(clause) > WORDS_OF_A_SENTENCE:
                    yield (
                        line,
                        f"{piece.kind}: {length(clause)} words in a sentence, expected at most {WORDS_OF_A_SENTENCE}: {clause[:70]!r}",
                    )
            if SUBJECT_CLAUSES.match(sentence) and not sentence.rstrip().endswith("?"):
                yield line, f"{piece.kind}: a clause as subject, expected a noun: {sentence[:70]!r}"


def around(text: str, found: re.Match[str]) -> str:
    return repr(text[max(found.start() - 30, 0) : found.end() + 30])


def constant(node: ast.expr) -> str | None:
    """The text of a string or f-string, a placeholder being one word."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "CODE" for part in node.values)
    return None


def strings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the strings under ``node``; parts of an f-string are not yielded again."""
    if isinstance(node, ast.expr) and (text := constant(node)) is not None:
        yield node.lineno, text
        return
    for child in ast.iter_child_nodes(node):
        yield from strings(child)


SPEAKS = frozenset({"warn", "error", "warning", "info", "debug", "exception", "fail", "exit"})
TEXTS = frozenset({"help", "description", "epilog"})


def of_python(source: str) -> Iterator[Text]:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False)
            if docstring is not None:
                first, _, rest = docstring.partition("\n")
                yield Text(node.body[0].lineno, "docstring", first + "\n" + textwrap.dedent(rest))
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield Text(node.lineno, "name", node.name.replace("_", " "))
        elif isinstance(node, ast.Raise) and node.exc is not None:
            yield from (Text(line, "error", text) for line, text in strings(node.exc) if " " in text)
        elif isinstance(node, ast.Assert) and node.msg is not None:
            yield from (Text(line, "error", text) for line, text in strings(node.msg) if " " in text)
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in SPEAKS:
                for argument in node.args:
                    yield from (Text(line, "error", text) for line, text in strings(argument) if " " in text)
            for keyword in node.keywords:
                if keyword.arg in TEXTS:
                    yield from (Text(line, "help", text) for line, text in strings(keyword.value) if " " in text)
    comments = [
        (token.start[0], token.string[1:], token.line[: token.start[1]].strip() != "")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    yield from joined_comments(comments)


def joined_comments(comments: Iterable[tuple[int, str, bool]]) -> Iterator[Text]:
    """Joins comments on successive lines. Each has a line, a text and True if code stands before it."""
    block: list[str] = []
    first = last = 0
    for line, text, trails in [*comments, (-1, "", True)]:
        if block and (line != last + 1 or trails):
            yield Text(first, "comment", textwrap.dedent("\n".join(block)))
            block = []
        if line >= 0 and not re.match(r"\s*(?:noqa|type:|pragma|fmt:|mypy:|!|ruff:)", text):
            if not block:
                first = line
            block.append(text)
            last = line if not trails else -2


def of_cpp(source: str) -> Iterator[Text]:
    comments = []
    for number, line in enumerate(source.splitlines(), 1):
        code = re.sub(r'"(?:[^"\\]|\\.)*"', lambda text: "_" * len(text[0]), line)
        if (at := code.find("//")) >= 0:
            comments.append((number, line[at:].lstrip("/"), code[:at].strip() != ""))
    yield from joined_comments(comments)
    without = re.sub(r"//[^\n]*", "", source)
    for match in re.finditer(r'"(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*', without):
        text = re.sub(r'"\s*"', "", match[0])[1:-1]
        if text.count(" ") > 2 and "->" not in text:
            yield Text(without.count("\n", 0, match.start()) + 1, "error", text)


def of_script(source: str) -> Iterator[Text]:
    lines = [(number, line) for number, line in enumerate(source.splitlines(), 1) if re.match(r"\s*#", line)]
    yield from joined_comments((number, line.lstrip()[1:], False) for number, line in lines)


def of_page(source: str) -> Iterator[Text]:
    fence = ""
    block: list[str] = []
    first = 1
    source = re.sub(r"<!--.*?-->", lambda comment: "\n" * comment[0].count("\n"), source, flags=re.DOTALL)
    for number, line in enumerate([*source.splitlines(), ""], 1):
        mark = re.match(r"\s*(```+|~~~+)", line)
        is_prose = not fence and mark is None and not line.lstrip().startswith(("|", "#", ":::"))
        if block and not is_prose:
            yield Text(first, "page", "\n".join(block))
            block = []
        if mark:
            fence = "" if fence else mark[1]
        elif fence:
            yield Text(number, "code", line)
        elif is_prose:
            if not block:
                first = number
            block.append(line)
        elif line.lstrip().startswith("|"):
            yield from (Text(number, "page", cell.strip()) for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")))
        elif line.startswith("#"):
            # A heading may begin with a preposition ("From DGL"), but not as a question.
            yield Text(number, "heading" if line.rstrip().endswith("?") else "page", line.lstrip("# "))
    if block:
        yield Text(first, "page", "\n".join(block))


READERS = {
    ".py": of_python,
    ".pyi": of_python,
    ".cpp": of_cpp,
    ".h": of_cpp,
    ".md": of_page,
    ".sh": of_script,
    ".yml": of_script,
    ".toml": of_script,
}
NAMES = {"Makefile": of_script, "run": of_script}


def files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            inside = (
                file
                for file in sorted(path.rglob("*"))
                if not any(part.startswith(".") for part in file.relative_to(path).parts)
            )
            yield from (file for file in inside if file.is_file() and file.suffix in READERS)
        else:
            yield path


EVERYTHING = (
    *(
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "Makefile",
        "mkdocs.yml",
        "pyproject.toml",
        "setup.py",
        ".ci/run",
    ),
    *("salientpp", "csrc", "tests", "docs", "examples", "benchmarks"),
)


def main(arguments: list[str]) -> int:
    found = 0
    for file in files(map(Path, arguments) if arguments else (ROOT / name for name in EVERYTHING)):
        reader = READERS.get(file.suffix) or NAMES[file.name]
        for piece in reader(file.read_text()):
            for line, fault in faults(piece):
                print(f"{file}:{line}: {fault}")
                found += 1
    print(f"{found} faults" if found else "the prose has no faults that this check sees")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
