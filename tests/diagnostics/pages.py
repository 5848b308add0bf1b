"""Reads what a page of a report shows."""

import base64
from html.parser import HTMLParser

VOID = {"meta", "img", "wbr"}


class Page(HTMLParser):
    """Sections of a page by title: texts, tables by title, and images; refuses tags out of order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.sections, self.tables, self.images = [], {}, {}, []
        self.texts, self.heading, self.title = [], "", ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)
        if tag == "section":
            self.texts = []
        elif tag == "table":
            self.tables[self.heading] = self.rows = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in {"td", "th"}:
            self.rows[-1].append("")
        elif tag == "img":
            kind, data = dict(attributes)["src"].split(",")
            assert kind == "data:image/svg+xml;base64"
            self.images.append(base64.b64decode(data).decode())

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        tag = self.open[-1] if self.open else ""
        if tag in {"td", "th"}:
            self.rows[-1][-1] += data
        elif tag == "h2":
            self.sections[data] = self.texts
        elif tag in {"h3", "summary"}:
            self.heading = data
        elif tag == "title":
            self.title = data
        elif tag == "p":
            self.texts.append(data)

    def column(self, title, number=1):
        """Return the cells of one column of a table, by those of the first."""
        return {row[0]: row[number] for row in self.tables[title][1:]}
