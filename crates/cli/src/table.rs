//! Plain text tables. Columns are as wide as their widest cell; numbers are right-aligned.

/// Renders `rows` below `header`. A column is right-aligned if all its cells start with a digit.
pub fn render(header: &[&str], rows: &[Vec<String>]) -> String {
    let widths: Vec<usize> = header
        .iter()
        .enumerate()
        .map(|(column, title)| {
            rows.iter()
                .map(|row| row[column].chars().count())
                .chain([title.chars().count()])
                .max()
                .unwrap_or(0)
        })
        .collect();
    let numeric: Vec<bool> = (0..header.len())
        .map(|column| rows.iter().all(|row| row[column].starts_with(|first: char| first.is_ascii_digit())))
        .collect();
    let line = |cells: Vec<&str>| {
        let mut text = String::new();
        for (column, cell) in cells.iter().enumerate() {
            let width = widths[column];
            text.push_str(&match numeric[column] {
                true => format!("{cell:>width$}  "),
                false => format!("{cell:<width$}  "),
            });
        }
        text.trim_end().to_owned() + "\n"
    };
    let mut out = line(header.to_vec());
    for row in rows {
        out.push_str(&line(row.iter().map(String::as_str).collect()));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_right_aligned_and_text_is_left_aligned() {
        let rows = vec![vec!["a".into(), "7".into()], vec!["long".into(), "1234".into()]];
        assert_eq!(render(&["name", "n"], &rows), "name     n\na        7\nlong  1234\n");
    }
}
