"""Reading a page back for assertions: its elements, its words, and whether its tags close."""

from __future__ import annotations

from html.parser import HTMLParser

_VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """A parsed page. ``elements`` are (tag, attributes); ``words`` is the text outside style and script."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.unclosed: list[str] = []
        self.mismatched: list[str] = []
        self._words: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.unclosed.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.unclosed and self.unclosed[-1] == tag:
            self.unclosed.pop()
        else:
            self.mismatched.append(tag)

    def handle_data(self, data: str) -> None:
        if not self.unclosed or self.unclosed[-1] not in ("style", "script"):
            self._words.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self._words).split())

    def tags(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def with_class(self, name: str) -> list[dict[str, str | None]]:
        return [found for _, found in self.elements if name in (found.get("class") or "").split()]
