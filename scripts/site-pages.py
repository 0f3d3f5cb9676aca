"""The hooks of mkdocs.yml: generated pages, and links out of docs.

Four kinds of pages are generated at each build, and none is committed. README.md is the front page. The reference's commands,
settings and schemas come from a built `homenode` (HOMENODE, or one in CARGO_TARGET_DIR or target) and from data/schema. Notebooks come
with their output from scripts/notebooks.py. Any other file of the repository that a page links to becomes a page below
`repository`, so that every link works without a network.

Pages are written for GitHub. Where Python-Markdown needs lists in a different form, they are converted.
"""

import json
import logging
import os
import posixpath
import re
import subprocess
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

# A warning from here fails the build.
LOG = logging.getLogger("mkdocs.hooks.site")
ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
ITEM = re.compile(r"( *)([-*]|\d+\.) +(?=\S)")
# Files outside of docs that are pages of the site, and where.
PAGES = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md"}
# Pages are written for 130 columns of code.
STYLE = ".md-grid { max-width: 88rem }\n"
# What a browser fetches by itself when it shows a page.
FETCHED = re.compile(
    r"""(?:<(?:script|img|iframe)\b[^>]*\bsrc|<link\b[^>]*rel="?(?:stylesheet|preload|icon)[^>]*href)="?(https?:[^">]*)"""
)
# The source of each page, by its place in the site.
sources: dict[str, str] = {}


TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")


def homenode() -> str:
    """The built program."""
    given = os.environ.get("HOMENODE")
    for program in [Path(given)] if given else [TARGET / "release/homenode", TARGET / "debug/homenode"]:
        if program.exists():
            return str(program.resolve())
    raise PluginError("no built homenode: 'make build' makes one, or HOMENODE says where it is")


def says(*arguments: str) -> str:
    """The program's output, 100 columns wide as in a pipe."""
    run = subprocess.run([homenode(), *arguments], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise PluginError(f"homenode {' '.join(arguments)}: {run.stderr}")
    return run.stdout.rstrip().replace("Usage: " + Path(homenode()).name, "Usage: homenode")


def fenced(text: str, language: str = "text") -> str:
    """A text, escaped so that it is shown unchanged."""
    fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall(r"`{3,}", text))])
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"


def commands() -> str:
    """A part for each command, from its help."""
    parts = ["# Commands", "From `homenode COMMAND --help`. `homenode man COMMAND` prints the same as a page of the manual."]

    def add(names: list[str], level: int) -> None:
        text = says(*names, "--help")
        parts.append(f"{'#' * level} {' '.join(['homenode', *names])}\n\n{fenced(text)}")
        # Commands are listed before options, under one heading or several.
        for name in re.findall(r"^  ([a-z][a-z-]*)(?=  )", text.split("\nOptions:\n")[0], re.M):
            if name != "help":
                add([*names, name], min(level + 1, 3) if names else 2)

    add([], 2)
    return "\n\n".join(parts)


def settings() -> str:
    """All settings with their defaults."""
    return "\n\n".join([
        "# Settings",
        "What `homenode config show --defaults` prints. [homenode.toml](../repository/deploy/homenode.toml.md) says what each is"
        " for, `homenode config check FILE` checks a file, `homenode sim --config FILE` tries it on the twin.",
        fenced(says("config", "show", "--defaults"), "toml"),
    ])


def kind(schema: dict | bool) -> str:
    """The type of a value, in a few words."""
    if isinstance(schema, bool):
        return "any"
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    for several in ("oneOf", "anyOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(kind(one) for one in schema[several]))
    types = schema.get("type", "any")
    if types == "array" and isinstance(schema.get("items"), dict):
        return f"list of {kind(schema['items'])}"
    return types if isinstance(types, str) else " or ".join(types)


def cell(text: str) -> str:
    """A text for a table cell."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def keys(schema: dict | bool) -> str:
    """The keys of an object as a table, or the alternatives of a value."""
    if isinstance(schema, bool):
        return ""
    forms = schema.get("oneOf") or schema.get("anyOf") or []
    out = [cell(schema.get("description", ""))]
    if schema.get("properties"):
        rows = [
            f"| `{key}` | {cell(kind(value))} | {'yes' if key in (schema.get('required') or []) else ''} "
            f"| {cell(value.get('description', '') if isinstance(value, dict) else '')} |"
            for key, value in schema["properties"].items()
        ]
        out.append("\n".join(["| key | type | needed | what it is |", "|---|---|---|---|", *rows]))
    for form in forms:
        out.append(f"**{cell(kind(form))}** {keys(form)}".rstrip())
    return "\n\n".join(part for part in out if part)


def schema_page(text: str) -> str:
    """A schema as tables, and in full."""
    schema = json.loads(text)
    parts = [f"# {schema.get('title', 'Schema')}", keys(schema)]
    for name, part in sorted(schema.get("$defs", {}).items()):
        parts.append(f"## {name}\n\n{keys(part) or kind(part)}")
    return "\n\n".join([*parts, "## The schema itself", fenced(text, "json")])


def schemas() -> str:
    """The list of all schemas."""
    parts = ["# Files and JSON", "Schemas of the files that people write, and of what `--json` prints ([JSON.md](../JSON.md))."]
    for folder, title in [("data/schema", "Files"), ("data/schema/json", "JSON")]:
        rows = []
        for path in sorted((ROOT / folder).glob("*.schema.json")):
            schema = json.loads(path.read_text())
            about = cell(schema.get("description", "").split(". ")[0])
            rows.append(f"| [{path.name.removesuffix('.schema.json')}](../repository/{folder}/{path.name}.md) | {about} |")
        parts += [f"## {title}", "\n".join(["| schema | what it is of |", "|---|---|", *rows])]
    return "\n\n".join(parts)


def page_of(path: str) -> str:
    """The place of a file or folder of the repository in the site."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith(".ipynb"):
        return path.removesuffix("ipynb") + "md"
    return "repository/" + (path if path.endswith(".md") else f"{path}.md")


def is_markdown(path: str) -> bool:
    """Whether a file of the repository has links and lists, instead of being shown as a block of code."""
    return path.endswith((".md", ".ipynb")) or (ROOT / path).is_dir()


def notebook(path: str) -> str:
    """A notebook with its output."""
    page = TARGET / "notebooks" / f"{Path(path).stem}.md"
    if not page.exists():
        raise PluginError(f"{path} was not run: 'make site' runs all notebooks")
    return page.read_text()


def content(path: str) -> str:
    """The page of a file or folder of the repository."""
    place = ROOT / path
    if path.endswith(".ipynb"):
        return notebook(path)
    if place.is_dir():
        rows = [f"- [{one.name}]({posixpath.basename(path)}/{one.name})" for one in sorted(place.iterdir()) if one.is_file()]
        return "\n".join([f"# {path}", "", *rows])
    text = place.read_text()
    if path.endswith(".md"):
        return text
    if path.endswith(".schema.json"):
        return schema_page(text)
    return f"# {path}\n\n{fenced(text, {'.rs': 'rust', '.py': 'python', '.toml': 'toml'}.get(place.suffix, 'text'))}"


def prose(text: str):
    """The lines of a page, each with whether it is text rather than code between fences."""
    fence = None
    for line in text.split("\n"):
        mark = re.match(r" *(`{3,}|~{3,})", line)
        if fence is None:
            fence = mark[1] if mark else None
            yield line, mark is None
        else:
            yield line, False
            if mark and mark[1].startswith(fence) and line.strip() == mark[1]:
                fence = None


def target_of(path: str, link: str) -> str | None:
    """The file of the repository that a link in another one leads to; None if it leads elsewhere."""
    if re.match(r"[a-z]+:|#", link):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link.split("#")[0]))


def on_files(files, config):
    """Adds the generated pages: notebooks, files that pages link to, directly or indirectly, and the reference."""

    def add(uri: str, text: str, source: str | None = None) -> None:
        files.append(File.generated(config, uri, content=text))
        if source:
            sources[uri] = source

    for file in files.documentation_pages():
        sources[file.src_uri] = f"docs/{file.src_uri}"
    written = [str(path.relative_to(ROOT)) for path in (ROOT / "data/schema").rglob("*.schema.json")]
    notebooks = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    for picture in sorted((TARGET / "notebooks").glob("*.svg")):
        files.append(File.generated(config, f"notebooks/{picture.name}", content=picture.read_bytes()))
    waiting = [*PAGES, *sources.values(), *written, *notebooks]
    known = set(waiting)
    while waiting:
        path = waiting.pop()
        text = content(path)
        if page_of(path) not in sources:
            add(page_of(path), text, path)
        if not is_markdown(path):
            continue
        for line, is_text in prose(text):
            for link in LINK.findall(line) if is_text else []:
                target = target_of(path, link[1])
                # Files in docs are already there, or missing, which mkdocs reports.
                if target and target not in known and not target.startswith(("docs/", "..")) and (ROOT / target).exists():
                    known.add(target)
                    waiting.append(target)
    add("reference/commands.md", commands())
    add("reference/settings.md", settings())
    add("reference/schemas.md", schemas())
    add("assets/site.css", STYLE)
    add("assets/iframe-worker.js", (TARGET / "iframe-worker/package/shim/index.js").read_text())
    return files


def relinked(line: str, uri: str, path: str) -> str:
    """A line with its links adapted to the site."""

    def link(match: re.Match) -> str:
        target = target_of(path, match[2])
        if target is None or not (ROOT / target).exists():
            return match[0]
        _, hash_, anchor = match[2].partition("#")
        there = posixpath.relpath(page_of(target), posixpath.dirname(uri) or ".")
        return f"{match[1]}{there}{hash_}{anchor}{match[3]}"

    return LINK.sub(link, line)


def as_python_markdown(text: str) -> str:
    """Lists for Python-Markdown: an empty line before each, and the contents of an item indented by four columns."""
    out: list[str] = []
    offsets: list[int] = []
    before = ""
    for line, is_text in prose(text):
        indent = len(line) - len(line.lstrip())
        item = ITEM.match(line) if is_text else None
        if line.strip() and (is_text or line.lstrip().startswith("```")):
            while offsets and indent < offsets[-1]:
                offsets.pop()
        # Indented by four columns outside of a list it would be code.
        if item and indent < (offsets[-1] if offsets else 0) + 4:
            if before.strip() and not offsets and not ITEM.match(before):
                out.append("")
            at = indent - (offsets[-1] if offsets else 0)
            out.append("    " * len(offsets) + " " * at + line[indent:])
            offsets.append(item.end())
        elif offsets and line.strip():
            out.append("    " * len(offsets) + line[offsets[-1]:])
        else:
            out.append(line)
        before = line
    return "\n".join(out)


def on_page_markdown(markdown, page, config, files):
    """Adapts links that lead out of docs, and lists."""
    uri = page.file.src_uri
    path = sources.get(uri)
    if path is None or not is_markdown(path):
        return markdown
    lines = [relinked(line, uri, path) if is_text else line for line, is_text in prose(markdown)]
    return as_python_markdown("\n".join(lines))


def on_post_page(output, page, config):
    """Warns of anything fetched from elsewhere when a page is shown."""
    for address in FETCHED.findall(output):
        LOG.warning("%s: browsers would fetch %s", page.file.src_uri, address)
    return output
