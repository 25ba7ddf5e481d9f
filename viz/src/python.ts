/** Highlights Python: cuts a line into tokens, each with one colour. */

export interface Token {
  kind: "text" | "keyword" | "string" | "comment" | "number" | "name";
  text: string;
}

const KEYWORDS = new Set(
  "and as assert break class continue def del elif else except False finally for from global if import in is lambda None nonlocal not or pass raise return True try while with yield".split(
    " ",
  ),
);

const PATTERN = /(#.*$)|("""[^]*?(?:"""|$)|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(@?[A-Za-z_][\w.]*)|(\d[\w.]*)|([^#"'@A-Za-z_\d]+|.)/g;

export function tokens(line: string): Token[] {
  return [...line.matchAll(PATTERN)].map(([text, comment, string, word, digits]) => {
    if (comment) return { kind: "comment", text };
    if (string) return { kind: "string", text };
    if (digits) return { kind: "number", text };
    if (!word) return { kind: "text", text };
    if (KEYWORDS.has(word)) return { kind: "keyword", text };
    return { kind: word.startsWith("tl.") || word.startsWith("@") ? "name" : "text", text };
  });
}
