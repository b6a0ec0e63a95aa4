//! Lines of files, bounded before they are read.

use std::io::{BufRead, Read as _};

/// Why a line cannot be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LineError {
    /// The file cannot be read.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// It has no end within the limit.
    #[error("longer than {limit} bytes")]
    TooLong {
        /// The most that is read.
        limit: u64,
    },
}

/// The lines of a JSON Lines file, each with its number, from 1. Blank ones are left out. Ends behind
/// the first error.
#[derive(Debug)]
pub(crate) struct Lines<R> {
    reader: R,
    /// The most bytes of a line, its end included.
    limit: u64,
    number: u64,
    has_failed: bool,
}

impl<R: BufRead> Lines<R> {
    /// Reads lines of at most `limit` bytes each.
    pub(crate) fn new(reader: R, limit: u64) -> Self {
        Self {
            reader,
            limit,
            number: 0,
            has_failed: false,
        }
    }

    /// Reads the next line, empty at the end of the file.
    fn read(&mut self) -> Result<Vec<u8>, LineError> {
        let mut line = Vec::new();
        let limit = self.limit;
        let mut bounded = self.reader.by_ref().take(limit + 1);
        bounded.read_until(b'\n', &mut line)?;
        if line.len() as u64 > limit {
            return Err(LineError::TooLong { limit });
        }
        Ok(line)
    }
}

impl<R: BufRead> Iterator for Lines<R> {
    type Item = (u64, Result<Vec<u8>, LineError>);

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_failed {
            return None;
        }
        loop {
            self.number += 1;
            match self.read() {
                Ok(line) if line.is_empty() => return None,
                Ok(line) if line.trim_ascii().is_empty() => {}
                line => {
                    self.has_failed = line.is_err();
                    return Some((self.number, line));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8], limit: u64) -> Vec<(u64, Result<Vec<u8>, String>)> {
        let lines = Lines::new(text, limit);
        lines
            .map(|(number, line)| (number, line.map_err(|error| error.to_string())))
            .collect()
    }

    #[test]
    fn lines_have_their_numbers_and_blank_ones_count() {
        let found = read(b"a\n\n  \r\nbc\n\nd", 4);
        let expected = [(1, &b"a\n"[..]), (4, b"bc\n"), (6, b"d")];
        assert_eq!(
            found,
            expected.map(|(number, line)| (number, Ok(line.to_vec())))
        );
        assert_eq!(read(b"", 3), []);
    }

    #[test]
    fn a_line_over_the_limit_ends_it() {
        let found = read(b"ab\nabc\na\n", 3);
        let error = "longer than 3 bytes".to_owned();
        assert_eq!(found, [(1, Ok(b"ab\n".to_vec())), (2, Err(error))]);
        // A reader that never ends a line is not read to its end.
        let mut endless = Lines::new(std::io::BufReader::new(std::io::repeat(b' ')), 1 << 10);
        let (number, line) = endless.next().unwrap();
        assert!(number == 1 && line.is_err());
        assert!(endless.next().is_none());
    }
}
