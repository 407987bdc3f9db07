//! The Markdown files of the repository and the book in `docs/book`: links, named files, chapters,
//! line lengths.
//!
//! [`check`] needs no tool besides git. It reads every Markdown file and reports all problems at
//! once, each as `file:line: sentence`. [`build`] renders the book with mdBook.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};

use crate::test::Ignored;

/// The book: `book.toml` is here.
const BOOK: &str = "docs/book";
/// Its chapters.
const CHAPTERS: &str = "docs/book/src/";
/// The list of its chapters.
const SUMMARY: &str = "docs/book/src/SUMMARY.md";
/// The modules of the engine. Pages name their files without this prefix.
const ENGINE: &str = "crates/peerway/src/";
/// Directories of the workspace. A path in a code span that begins with one of them is complete.
const ROOTS: [&str; 10] = [
    "compat", "crates", "docs", "examples", "fuzz", "include", "plugins", "python", "testbed",
    "xtask",
];
/// The keywords before the name of an item where Rust code defines it.
const DEFINES: [&str; 9] =
    ["const", "enum", "fn", "macro_rules", "mod", "static", "struct", "trait", "type"];
/// The README has fewer lines than this: its reader decides in a minute.
const README_LINES: usize = 150;
/// The longest line of prose, in characters.
const WIDTH: usize = 120;

/// Checks every Markdown file that git tracks, or would track if it were added.
///
/// # Errors
///
/// All problems, one on each line, behind a line that counts them.
pub(crate) fn check(workspace: &Path) -> anyhow::Result<()> {
    let files = listed(workspace)?;
    let pages = read(workspace, &files)?;
    let problems = problems(workspace, &files, &pages);
    if problems.is_empty() {
        println!(
            "{} Markdown files: links, named files, chapters and lines are in order",
            pages.len()
        );
        return Ok(());
    }
    bail!("{} problems in Markdown files\n{}", problems.len(), problems.join("\n"))
}

/// Renders the book into `target/book`.
///
/// # Errors
///
/// [`Ignored`] where mdBook is not installed, and any failure of mdBook.
pub(crate) fn build(workspace: &Path) -> anyhow::Result<()> {
    match Command::new("mdbook").args(["build", BOOK]).current_dir(workspace).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => bail!("`mdbook build {BOOK}` failed: {status}"),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let how = "mdbook is not installed; `cargo install mdbook` installs it".to_owned();
            Err(Ignored(how).into())
        }
        Err(error) => Err(error).context("cannot start mdbook"),
    }
}

/// All problems, each as `file:line: sentence`, by file and line.
fn problems(workspace: &Path, files: &[String], pages: &Pages) -> Vec<String> {
    let mut found = Vec::new();
    for (file, page) in pages {
        check_links(workspace, pages, file, page, &mut found);
        if is_current(file) {
            check_named_files(workspace, files, file, page, &mut found);
        }
        check_lengths(file, page, &mut found);
        if file.starts_with(CHAPTERS) {
            check_includes(workspace, file, page, &mut found);
        }
    }
    check_summary(pages, &mut found);
    found.sort();
    found.iter().map(Problem::line).collect()
}

/// Something that is wrong in a file. Problems sort by file and line.
#[derive(Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Problem {
    file: String,
    number: usize,
    sentence: String,
}

impl Problem {
    fn new(file: &str, number: usize, sentence: String) -> Self {
        Self { file: file.to_owned(), number, sentence }
    }

    fn line(&self) -> String {
        format!("{}:{}: {}", self.file, self.number, self.sentence)
    }
}

/// Files by their path in the workspace, with `/` between the names.
type Pages = BTreeMap<String, Page>;

/// A Markdown file, cut into lines.
struct Page {
    lines: Vec<Line>,
}

struct Line {
    number: usize,
    text: String,
    kind: LineKind,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum LineKind {
    Prose,
    Heading,
    Table,
    /// A line of a fenced block, fences included.
    Code,
}

impl Page {
    fn new(text: &str) -> Self {
        let mut fence: Option<String> = None;
        let mut lines = Vec::new();
        for (at, line) in text.lines().enumerate() {
            let trimmed = line.trim();
            let kind = if let Some(open) = &fence {
                // A closing fence is at least as long as the opening one and has nothing behind it.
                if trimmed.starts_with(open.as_str()) && trimmed.chars().all(|c| open.contains(c)) {
                    fence = None;
                }
                LineKind::Code
            } else if let Some(open) = opening_fence(trimmed) {
                fence = Some(open);
                LineKind::Code
            } else if trimmed.starts_with('|') {
                LineKind::Table
            } else if heading(line).is_some() {
                LineKind::Heading
            } else {
                LineKind::Prose
            };
            lines.push(Line { number: at + 1, text: line.to_owned(), kind });
        }
        Self { lines }
    }

    /// The names by which links lead to the headings, as GitHub and mdBook make them.
    fn anchors(&self) -> BTreeSet<String> {
        let mut uses: BTreeMap<String, usize> = BTreeMap::new();
        let mut anchors = BTreeSet::new();
        for line in self.lines.iter().filter(|line| line.kind == LineKind::Heading) {
            let slug = slug(heading(&line.text).unwrap_or_default());
            let count = uses.entry(slug.clone()).or_default();
            anchors.insert(if *count == 0 { slug } else { format!("{slug}-{count}") });
            *count += 1;
        }
        anchors
    }
}

/// The files that git tracks or would track, and that exist.
fn listed(workspace: &Path) -> anyhow::Result<Vec<String>> {
    let list = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let output = Command::new("git")
        .args(list)
        .current_dir(workspace)
        .output()
        .context("cannot start git, which lists the files")?;
    if !output.status.success() {
        bail!("git cannot list files: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let text = String::from_utf8(output.stdout).context("a file name is not UTF-8")?;
    let names: BTreeSet<&str> = text.split('\0').filter(|name| !name.is_empty()).collect();
    // A deleted file stays in the index until the deletion is added.
    let exist = names.into_iter().filter(|name| workspace.join(name).is_file());
    Ok(exist.map(str::to_owned).collect())
}

/// The Markdown files among `files`.
fn read(workspace: &Path, files: &[String]) -> anyhow::Result<Pages> {
    let mut pages = Pages::new();
    for file in files.iter().filter(|file| file.ends_with(".md")) {
        let text = fs::read_to_string(workspace.join(file))
            .with_context(|| format!("cannot read {file}"))?;
        pages.insert(file.clone(), Page::new(&text));
    }
    Ok(pages)
}

/// Each relative link leads to an existing file and, where it names one, to an existing heading.
fn check_links(workspace: &Path, pages: &Pages, file: &str, page: &Page, found: &mut Vec<Problem>) {
    for line in page.lines.iter().filter(|line| line.kind != LineKind::Code) {
        for link in links(&line.text) {
            if let Err(sentence) = follow(workspace, pages, file, &link) {
                found.push(Problem::new(file, line.number, sentence));
            }
        }
    }
}

/// Follows one link of `file`; the error is the sentence that says what is wrong with it.
fn follow(workspace: &Path, pages: &Pages, file: &str, link: &str) -> Result<(), String> {
    if link.contains("://") || link.starts_with("mailto:") {
        return Ok(());
    }
    if link.is_empty() {
        return Err("a link has no target".to_owned());
    }
    let (place, anchor) = match link.split_once('#') {
        Some((place, anchor)) => (place, Some(anchor)),
        None => (link, None),
    };
    let target = if place.is_empty() { Some(file.to_owned()) } else { resolve(file, place) };
    let Some(target) = target else {
        return Err(format!("the link {link} leads out of the repository"));
    };
    if !workspace.join(&target).exists() {
        return Err(format!("the link {link} leads to {target}, which does not exist"));
    }
    if file.starts_with(CHAPTERS) && !target.starts_with(CHAPTERS) {
        return Err(format!(
            "the link {link} leads out of the book, where the built book has no page; name the path \
             instead"
        ));
    }
    if let (Some(anchor), Some(page)) = (anchor, pages.get(&target))
        && !page.anchors().contains(anchor)
    {
        return Err(format!("the link {link} names #{anchor}, and {target} has no such heading"));
    }
    Ok(())
}

/// Whether a page describes the repository as it is now: a page at the top or under `docs`. The
/// changelog and the notebook describe the past.
fn is_current(file: &str) -> bool {
    let is_history = file == "CHANGELOG.md" || file.starts_with("docs/notebook/");
    (!file.contains('/') || file.starts_with("docs/")) && !is_history
}

/// Each path in a code span names an existing file or directory. Where the page writes "`item` in
/// `file.rs`" or "`file.rs::item`", the file defines the item.
fn check_named_files(
    workspace: &Path,
    files: &[String],
    file: &str,
    page: &Page,
    found: &mut Vec<Problem>,
) {
    for line in page.lines.iter().filter(|line| line.kind != LineKind::Code) {
        let spans = code_spans(&line.text);
        let befores = std::iter::once(None).chain(spans.iter().map(Some));
        for (before, (between, span)) in befores.zip(&spans) {
            let (path, item) = match span.split_once("::") {
                Some((path, item)) => (path, Some(item)),
                None => (*span, before.filter(|_| *between == " in ").map(|(_, item)| *item)),
            };
            for path in alternatives(path) {
                if let Err(sentence) = find_named(workspace, files, &path, item) {
                    found.push(Problem::new(file, line.number, sentence));
                }
            }
        }
    }
}

/// Looks for the file or directory that a code span names; the error is the sentence that says what
/// is wrong with it. A span that is no path is right.
///
/// A path is complete if it begins with a directory of the workspace, and begins at [`ENGINE`] if
/// it begins with a module's directory. Any other path of a Rust file is the end of a path.
fn find_named(
    workspace: &Path,
    files: &[String],
    path: &str,
    item: Option<&str>,
) -> Result<(), String> {
    let is_name = |letter: char| letter.is_ascii_alphanumeric() || "_-./".contains(letter);
    // A name in capitals, as in `transport/NAME.rs`, stands for any name.
    let is_blank = |name: &str| {
        let stem = name.strip_suffix(".rs").unwrap_or(name);
        !stem.is_empty() && stem.chars().all(|letter| letter.is_ascii_uppercase())
    };
    if !path.chars().all(is_name) || path.split('/').any(is_blank) {
        return Ok(());
    }
    let first = path.split_once('/').map(|(first, _)| first);
    let is_module = |first: &str| !first.is_empty() && workspace.join(ENGINE).join(first).is_dir();
    let mut places: Vec<String> = if first.is_some_and(|first| ROOTS.contains(&first)) {
        vec![path.to_owned()]
    } else if first.is_some_and(is_module) {
        // The workspace has a directory `gpu` too.
        vec![format!("{ENGINE}{path}"), path.to_owned()]
    } else if path.ends_with(".rs") {
        let is_end = |file: &&String| {
            file.strip_suffix(path).is_some_and(|rest| rest.is_empty() || rest.ends_with('/'))
        };
        files.iter().filter(is_end).cloned().collect()
    } else {
        return Ok(());
    };
    places.retain(|place| workspace.join(place).exists());
    if places.is_empty() {
        return Err(format!("the page names `{path}`, which does not exist"));
    }
    let Some(item) = item.filter(|_| path.ends_with(".rs")) else { return Ok(()) };
    let is_part = |letter: char| letter.is_alphanumeric() || letter == '_';
    let item = item.split(|letter| !is_part(letter)).next().unwrap_or_default();
    // Several files may have this name. The page's context says which one it means.
    let is_defined = places.iter().any(|place| {
        let text = fs::read_to_string(workspace.join(place)).unwrap_or_default();
        let words: Vec<&str> =
            text.split(|letter| !is_part(letter)).filter(|word| !word.is_empty()).collect();
        words.windows(2).any(|pair| DEFINES.contains(&pair[0]) && pair[1] == item)
    });
    if is_defined {
        return Ok(());
    }
    Err(format!("the page names `{item}` in `{path}`, which does not define it"))
}

/// The paths that `a/{b,c}.rs` stands for; the text itself if it has no such list.
fn alternatives(path: &str) -> Vec<String> {
    let list = path.split_once('{').and_then(|(before, rest)| {
        let (names, behind) = rest.split_once('}')?;
        Some((before, names, behind))
    });
    match list {
        Some((before, names, behind)) => {
            names.split(',').map(|name| format!("{before}{}{behind}", name.trim())).collect()
        }
        None => vec![path.to_owned()],
    }
}

/// Each `{{#include ...}}` of a chapter names an existing file and, if it names an anchor, one that
/// the file has.
fn check_includes(workspace: &Path, file: &str, page: &Page, found: &mut Vec<Problem>) {
    for line in &page.lines {
        for include in includes(&line.text) {
            if let Err(sentence) = follow_include(workspace, file, include) {
                found.push(Problem::new(file, line.number, sentence));
            }
        }
    }
}

fn follow_include(workspace: &Path, file: &str, include: &str) -> Result<(), String> {
    let (place, part) = include.split_once(':').unwrap_or((include, ""));
    let target = resolve(file, place);
    let text = target.and_then(|target| fs::read_to_string(workspace.join(target)).ok());
    let Some(text) = text else {
        return Err(format!("the included file {place} cannot be read"));
    };
    let anchor = part.split(':').next().unwrap_or_default();
    let is_anchor = anchor.chars().any(|letter| !letter.is_ascii_digit());
    if is_anchor && !text.lines().any(|line| opened_anchor(line) == Some(anchor)) {
        return Err(format!("the included file {place} has no `ANCHOR: {anchor}`"));
    }
    Ok(())
}

/// The README is short, and the lines that people read as text fit into a window.
fn check_lengths(file: &str, page: &Page, found: &mut Vec<Problem>) {
    if file == "README.md" && page.lines.len() >= README_LINES {
        let sentence = format!(
            "the README has {} lines; it must have fewer than {README_LINES}",
            page.lines.len()
        );
        found.push(Problem::new(file, README_LINES, sentence));
    }
    let is_wrapped = matches!(file, "README.md" | "ARCHITECTURE.md") || file.starts_with(CHAPTERS);
    if !is_wrapped {
        return;
    }
    for line in &page.lines {
        let is_prose = matches!(line.kind, LineKind::Prose | LineKind::Heading);
        // A link cannot be broken.
        let has_link = line.text.contains("](") || line.text.contains("://");
        let length = line.text.chars().count();
        if is_prose && !has_link && length > WIDTH {
            let sentence = format!("the line has {length} columns; wrap prose at {WIDTH} or less");
            found.push(Problem::new(file, line.number, sentence));
        }
    }
}

/// Every chapter stands in the summary, once. A summary that names a missing chapter is a dead
/// link, which [`check_links`] reports.
fn check_summary(pages: &Pages, found: &mut Vec<Problem>) {
    let mut listed: BTreeSet<String> = BTreeSet::new();
    if let Some(summary) = pages.get(SUMMARY) {
        for line in summary.lines.iter().filter(|line| line.kind != LineKind::Code) {
            for chapter in links(&line.text).iter().filter_map(|link| resolve(SUMMARY, link)) {
                if !listed.insert(chapter.clone()) {
                    let sentence = format!("the summary lists {chapter} twice");
                    found.push(Problem::new(SUMMARY, line.number, sentence));
                }
            }
        }
    }
    let chapters = pages.keys().filter(|file| file.starts_with(CHAPTERS) && *file != SUMMARY);
    for chapter in chapters.filter(|chapter| !listed.contains(*chapter)) {
        let sentence = format!("the chapter is not listed in {SUMMARY}");
        found.push(Problem::new(chapter, 1, sentence));
    }
}

/// The path in the repository that a relative `target` in `file` means; `None` if it leaves the
/// repository.
fn resolve(file: &str, target: &str) -> Option<String> {
    if target.starts_with('/') {
        return None;
    }
    let mut names: Vec<&str> = file.split('/').collect();
    names.pop();
    for name in target.split('/') {
        match name {
            "" | "." => {}
            ".." => {
                names.pop()?;
            }
            name => names.push(name),
        }
    }
    Some(names.join("/"))
}

/// The targets of the links on a line. Links inside code spans do not count.
fn links(line: &str) -> Vec<String> {
    let text = without_code(line);
    let mut found = Vec::new();
    let mut rest = text.as_str();
    while let Some(at) = rest.find("](") {
        rest = &rest[at + 2..];
        let Some(end) = rest.find(')') else { break };
        found.push(target(&rest[..end]));
        rest = &rest[end + 1..];
    }
    // `[name]: target`, but not a footnote.
    let trimmed = text.trim_start();
    if trimmed.starts_with('[')
        && !trimmed.starts_with("[^")
        && let Some((name, place)) = trimmed.split_once("]: ")
        && !name.contains("](")
    {
        found.push(target(place));
    }
    found
}

/// A link's target without its title and brackets.
fn target(text: &str) -> String {
    let first = text.split_whitespace().next().unwrap_or_default();
    first.trim_start_matches('<').trim_end_matches('>').to_owned()
}

/// The line without its code spans.
fn without_code(line: &str) -> String {
    let mut text = String::new();
    let mut rest = line;
    while let Some(at) = rest.find('`') {
        text.push_str(&rest[..at]);
        let ticks = leading_ticks(&rest[at..]);
        let behind = &rest[at + ticks..];
        rest = match closing_ticks(behind, ticks) {
            Some(end) => &behind[end + ticks..],
            None => behind,
        };
    }
    text.push_str(rest);
    text
}

/// The code spans of a line, each with the text between it and the one before.
fn code_spans(line: &str) -> Vec<(&str, &str)> {
    let mut spans = Vec::new();
    let mut rest = line;
    while let Some(at) = rest.find('`') {
        let ticks = leading_ticks(&rest[at..]);
        let behind = &rest[at + ticks..];
        rest = match closing_ticks(behind, ticks) {
            Some(end) => {
                spans.push((&rest[..at], behind[..end].trim()));
                &behind[end + ticks..]
            }
            None => behind,
        };
    }
    spans
}

fn leading_ticks(text: &str) -> usize {
    text.bytes().take_while(|byte| *byte == b'`').count()
}

/// Where the next run of exactly so many backticks begins.
fn closing_ticks(text: &str, ticks: usize) -> Option<usize> {
    let mut from = 0;
    while let Some(at) = text[from..].find('`') {
        let start = from + at;
        let run = leading_ticks(&text[start..]);
        if run == ticks {
            return Some(start);
        }
        from = start + run;
    }
    None
}

/// The characters that open a fenced block: three or more backticks or tildes.
fn opening_fence(trimmed: &str) -> Option<String> {
    let mark = trimmed.chars().next().filter(|mark| *mark == '`' || *mark == '~')?;
    let fence: String = trimmed.chars().take_while(|letter| *letter == mark).collect();
    // A line such as "```a```" is a code span.
    let is_open = fence.len() >= 3 && !trimmed[fence.len()..].contains('`');
    is_open.then_some(fence)
}

/// The text of a heading line.
fn heading(line: &str) -> Option<&str> {
    let level = line.bytes().take_while(|byte| *byte == b'#').count();
    let text = line.get(level..)?;
    let is_heading = (1..=6).contains(&level) && text.starts_with(' ');
    is_heading.then(|| text.trim())
}

/// The anchor of a heading: its visible text in lower case, with `-` for each space and without
/// punctuation.
fn slug(heading: &str) -> String {
    let mut slug = String::new();
    for letter in without_targets(heading).trim().chars() {
        if letter.is_alphanumeric() || letter == '-' || letter == '_' {
            slug.extend(letter.to_lowercase());
        } else if letter.is_whitespace() {
            slug.push('-');
        }
    }
    slug
}

/// The text with `[text](target)` as `[text`, whose bracket a slug drops.
fn without_targets(heading: &str) -> String {
    let mut text = String::new();
    let mut rest = heading;
    while let Some(at) = rest.find("](") {
        text.push_str(&rest[..at]);
        let behind = &rest[at + 2..];
        rest = behind.find(')').map_or("", |end| &behind[end + 1..]);
    }
    text.push_str(rest);
    text
}

/// What the `{{#include ...}}` directives of a line name.
fn includes(line: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = line;
    while let Some(at) = rest.find("{{#include ") {
        rest = &rest[at + "{{#include ".len()..];
        let Some(end) = rest.find("}}") else { break };
        found.push(rest[..end].trim());
        rest = &rest[end..];
    }
    found
}

/// The anchor that a line opens for mdBook's includes.
fn opened_anchor(line: &str) -> Option<&str> {
    let (_, behind) = line.split_once("ANCHOR:")?;
    behind.split_whitespace().next()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// A directory with these files, which is removed when it is dropped.
    struct Tree {
        root: PathBuf,
        files: Vec<String>,
    }

    impl Tree {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let unique = format!("peerway-xtask-book-{}-{name}", std::process::id());
            let root = std::env::temp_dir().join(unique);
            for (file, text) in files {
                let path = root.join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            let names = files.iter().map(|(file, _)| (*file).to_owned());
            Self { root, files: names.collect() }
        }

        fn problems(&self) -> Vec<String> {
            let pages = read(&self.root, &self.files).unwrap();
            problems(&self.root, &self.files, &pages)
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.root);
        }
    }

    #[test]
    fn sound_files_have_no_problems() {
        let tree = Tree::new(
            "sound",
            &[
                ("README.md", "# A\n\n[b](docs/book/src/b.md#two-words), [c](LICENSE), [d](#a)\n"),
                ("LICENSE", "text\n"),
                ("docs/book/src/SUMMARY.md", "# Summary\n\n- [B](b.md)\n"),
                ("docs/book/src/b.md", "# B\n\n## Two words\n\n[up](SUMMARY.md)\n"),
            ],
        );
        assert_eq!(tree.problems(), Vec::<String>::new());
    }

    #[test]
    fn links_in_code_do_not_count() {
        let text = "# A\n\n```\n[x](missing.md)\n```\n\n`[x](missing.md)` and ``a ` [x](gone)``\n";
        let tree = Tree::new("code", &[("README.md", text)]);
        assert_eq!(tree.problems(), Vec::<String>::new());
    }

    #[test]
    fn a_missing_file_and_a_missing_heading_are_reported_with_their_lines() {
        let text = "# A\n\n[x](missing.md)\n\n[y](b.md#nothing)\n\n[z](../out.md)\n";
        let tree = Tree::new("missing", &[("CHANGELOG.md", text), ("b.md", "# B\n")]);
        let expected = [
            "CHANGELOG.md:3: the link missing.md leads to missing.md, which does not exist",
            "CHANGELOG.md:5: the link b.md#nothing names #nothing, and b.md has no such heading",
            "CHANGELOG.md:7: the link ../out.md leads out of the repository",
        ];
        assert_eq!(tree.problems(), expected);
    }

    #[test]
    fn equal_headings_have_numbered_anchors() {
        let page = Page::new("# A b\n## A b\n```\n# no heading\n```\n## `C::d`, e_f\n## A b\n");
        let anchors: Vec<String> = page.anchors().into_iter().collect();
        assert_eq!(anchors, ["a-b", "a-b-1", "a-b-2", "cd-e_f"]);
        assert_eq!(slug("[Text](there.md) & more"), "text--more");
    }

    #[test]
    fn a_chapter_missing_from_the_summary_and_one_listed_twice_are_reported() {
        let tree = Tree::new(
            "summary",
            &[
                ("docs/book/src/SUMMARY.md", "# Summary\n\n- [B](b.md)\n- [B](b.md)\n"),
                ("docs/book/src/b.md", "# B\n"),
                ("docs/book/src/c.md", "# C\n"),
            ],
        );
        let expected = [
            "docs/book/src/SUMMARY.md:4: the summary lists docs/book/src/b.md twice",
            "docs/book/src/c.md:1: the chapter is not listed in docs/book/src/SUMMARY.md",
        ];
        assert_eq!(tree.problems(), expected);
    }

    #[test]
    fn a_summary_that_names_a_missing_chapter_is_a_dead_link() {
        let tree = Tree::new("dead", &[("docs/book/src/SUMMARY.md", "- [B](b.md)\n")]);
        let problems = tree.problems();
        assert_eq!(problems.len(), 1);
        assert!(problems[0].contains("docs/book/src/b.md, which does not exist"), "{problems:?}");
    }

    #[test]
    fn chapters_link_to_chapters_only() {
        let tree = Tree::new(
            "out",
            &[
                ("ARCHITECTURE.md", "# A\n"),
                ("docs/book/src/SUMMARY.md", "- [B](b.md)\n"),
                ("docs/book/src/b.md", "# B\n\n[a](../../../ARCHITECTURE.md)\n"),
            ],
        );
        let problems = tree.problems();
        assert_eq!(problems.len(), 1);
        assert!(problems[0].starts_with("docs/book/src/b.md:3: "), "{problems:?}");
        assert!(problems[0].contains("leads out of the book"), "{problems:?}");
    }

    #[test]
    fn includes_name_files_and_anchors_that_exist() {
        let text = "{{#include ../../../A.md:part}}\n{{#include ../../../A.md:5:}}\n\
                    {{#include ../../../A.md:gone}}\n{{#include ../../../B.md}}\n";
        let tree = Tree::new(
            "includes",
            &[
                ("A.md", "<!-- ANCHOR: part -->\ntext\n<!-- ANCHOR_END: part -->\n"),
                ("docs/book/src/SUMMARY.md", "- [B](b.md)\n"),
                ("docs/book/src/b.md", text),
            ],
        );
        let expected = [
            "docs/book/src/b.md:3: the included file ../../../A.md has no `ANCHOR: gone`",
            "docs/book/src/b.md:4: the included file ../../../B.md cannot be read",
        ];
        assert_eq!(tree.problems(), expected);
    }

    #[test]
    fn a_named_file_that_does_not_exist_is_reported() {
        let text = "`crates/a/src/lib.rs` `crates/a/src/gone.rs`\n\
                    `progress/lane.rs` `progress/{lane,gone}.rs` `progress/` `progress/old/`\n\
                    | `peer.rs` `src/peer.rs` `eer.rs` |\n\
                    `peer.rs::connect` `peer.rs::conn` `peer.rs::connect()`, `way` in `peer.rs`\n\
                    `docs/gone.md` `xtask/src/gone.rs`\n";
        let files = [
            ("CONTRIBUTING.md", text),
            ("crates/a/src/lib.rs", ""),
            ("crates/peerway/src/peer.rs", "// A way\nfn connect() {}\n"),
            ("crates/peerway/src/progress/lane.rs", ""),
        ];
        let expected = [
            "CONTRIBUTING.md:1: the page names `crates/a/src/gone.rs`, which does not exist",
            "CONTRIBUTING.md:2: the page names `progress/gone.rs`, which does not exist",
            "CONTRIBUTING.md:2: the page names `progress/old/`, which does not exist",
            "CONTRIBUTING.md:3: the page names `eer.rs`, which does not exist",
            "CONTRIBUTING.md:4: the page names `conn` in `peer.rs`, which does not define it",
            "CONTRIBUTING.md:4: the page names `way` in `peer.rs`, which does not define it",
            "CONTRIBUTING.md:5: the page names `docs/gone.md`, which does not exist",
            "CONTRIBUTING.md:5: the page names `xtask/src/gone.rs`, which does not exist",
        ];
        assert_eq!(Tree::new("named", &files).problems(), expected);
    }

    #[test]
    fn placeholders_code_blocks_and_history_name_any_file() {
        let text = "`crates/peerway/src/transport/NAME.rs`, `NAME/mod.rs`, `/proc/PID/mem`,\n\
                    `target/book`, `std::fs`, `a/b`, `crates/<name>/x.rs`\n\n\
                    ```\n`crates/gone.rs`\n```\n";
        let past = "`crates/gone.rs`\n";
        let files = [
            ("ARCHITECTURE.md", text),
            ("CHANGELOG.md", past),
            ("docs/notebook/2026-01-01-x.md", past),
            ("crates/a/README.md", past),
        ];
        assert_eq!(Tree::new("blanks", &files).problems(), Vec::<String>::new());
    }

    #[test]
    fn long_prose_is_reported_but_not_tables_code_and_links() {
        let long = "x".repeat(WIDTH + 1);
        let text = format!("{long}\n\n| {long} |\n\n```\n{long}\n```\n\n[{long}](#nothing)\n");
        let files = [("ARCHITECTURE.md", text.as_str()), ("CHANGELOG.md", long.as_str())];
        let tree = Tree::new("long", &files);
        let problems = tree.problems();
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[0].starts_with("ARCHITECTURE.md:1: the line has 121 columns"));
        assert!(problems[1].starts_with("ARCHITECTURE.md:9: the link #nothing"));
    }

    #[test]
    fn a_readme_has_fewer_than_150_lines() {
        let long = "a\n".repeat(README_LINES);
        let tree = Tree::new("readme", &[("README.md", long.as_str())]);
        let expected = ["README.md:150: the README has 150 lines; it must have fewer than 150"];
        assert_eq!(tree.problems(), expected);
        let short = "a\n".repeat(README_LINES - 1);
        let tree = Tree::new("readme-short", &[("README.md", short.as_str())]);
        assert_eq!(tree.problems(), Vec::<String>::new());
    }
}
