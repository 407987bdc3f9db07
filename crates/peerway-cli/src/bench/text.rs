//! Text for a window of 80 columns.

use std::fmt;

/// The columns of a window. No line of a table, a legend or a help text is longer.
pub(crate) const WIDTH: usize = 80;

/// The width of the terms of a legend.
const TERM: usize = 11;

/// Writes a term and its explanation, wrapped beside the term.
pub(crate) fn explain(f: &mut impl fmt::Write, term: &str, text: &str) -> fmt::Result {
    let mut head = format!("{term:<TERM$} ");
    if term.chars().count() > TERM {
        // A long term stands on a line of its own.
        writeln!(f, "{term}")?;
        head = " ".repeat(TERM + 1);
    }
    for line in wrap(text, WIDTH - TERM - 1) {
        writeln!(f, "{}", format!("{head}{line}").trim_end())?;
        head = " ".repeat(TERM + 1);
    }
    Ok(())
}

/// Writes a paragraph.
pub(crate) fn paragraph(f: &mut impl fmt::Write, text: &str) -> fmt::Result {
    wrap(text, WIDTH).iter().try_for_each(|line| writeln!(f, "{line}"))
}

/// Breaks a text between words. A word that is longer than a line has its own.
pub(crate) fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.len() - 1;
        let line = &mut lines[last];
        if line.is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() <= width {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_between_words_and_lose_none() {
        let text = "one two three four five six seven";
        let lines = wrap(text, 11);
        assert_eq!(lines, ["one two", "three four", "five six", "seven"]);
        assert_eq!(wrap("", 10), [""]);
        assert_eq!(wrap("abcdefghijkl m", 5), ["abcdefghijkl", "m"]);
        let mut out = String::new();
        explain(&mut out, "verified:", &"word ".repeat(40)).unwrap();
        assert!(out.lines().all(|line| line.chars().count() <= WIDTH), "{out}");
        assert!(out.lines().skip(1).all(|line| line.starts_with("            word")), "{out}");
        assert_eq!(out.matches("word").count(), 40);
    }
}
