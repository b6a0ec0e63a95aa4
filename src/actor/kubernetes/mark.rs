//! The line by which a script says that its program has ended.
//!
//! A connection ends with the streams of a program, and those are held by whatever it left running. So the
//! script writes a line of its own to the error stream once the program has ended, which is taken out again.
//! A guest can find out the line and write it before; all that it wins is to go on in the background, which
//! it may anyway.

/// The line of one command.
#[derive(Debug, Clone)]
pub(super) struct Mark {
    /// What it begins with.
    text: String,
}

/// Digits of the exit code.
const DIGITS: usize = 3;

impl Mark {
    pub(super) fn new() -> Self {
        Self {
            text: format!("\nwardian-end-{:032x}-", rand::random::<u128>()),
        }
    }

    /// Returns what a script must do after its program, to write the line and end as the program did.
    pub(super) fn script(&self) -> String {
        let text = self.text.trim_start();
        format!("code=$?\nprintf '\\n%s%03d' {text} \"$code\" >&2\nexit \"$code\"")
    }
}

/// Takes the line out of a stream.
#[derive(Debug)]
pub(super) struct Filter {
    mark: Vec<u8>,
    /// What may be the beginning of the line.
    held: Vec<u8>,
    is_found: bool,
}

impl Filter {
    pub(super) fn new(mark: &Mark) -> Self {
        Self {
            mark: mark.text.clone().into_bytes(),
            held: Vec::new(),
            is_found: false,
        }
    }

    /// Gives `keep` what is not of the line, and returns the exit code when the line is complete.
    pub(super) fn add(&mut self, bytes: &[u8], mut keep: impl FnMut(&[u8])) -> Option<i32> {
        if self.is_found {
            keep(bytes);
            return None;
        }
        self.held.extend_from_slice(bytes);
        let length = self.mark.len() + DIGITS;
        let found = self
            .held
            .windows(length)
            .position(|window| window.starts_with(&self.mark));
        let Some(at) = found else {
            let sure = self.held.len().saturating_sub(length - 1);
            keep(&self.held[..sure]);
            self.held.drain(..sure);
            return None;
        };
        let held = std::mem::take(&mut self.held);
        let (before, line) = held.split_at(at);
        let (line, after) = line.split_at(length);
        keep(before);
        keep(after);
        self.is_found = true;
        let digits = std::str::from_utf8(&line[self.mark.len()..]).ok()?;
        digits.parse().ok()
    }

    /// Gives `keep` what was held back: the stream has ended.
    pub(super) fn finish(&mut self, mut keep: impl FnMut(&[u8])) {
        keep(&std::mem::take(&mut self.held));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what is kept of a stream that comes in pieces of a size, and the code.
    fn filtered(mark: &Mark, stream: &[u8], size: usize) -> (Vec<u8>, Option<i32>) {
        let mut filter = Filter::new(mark);
        let (mut kept, mut code) = (Vec::new(), None);
        for piece in stream.chunks(size) {
            let found = filter.add(piece, |bytes| kept.extend_from_slice(bytes));
            code = code.or(found);
        }
        filter.finish(|bytes| kept.extend_from_slice(bytes));
        (kept, code)
    }

    #[test]
    fn the_line_is_taken_out_however_it_comes() {
        let mark = Mark::new();
        let line = format!("{}007", mark.text);
        let stream = format!("error\n\nwardian-end-{line}later");
        for size in [1, 2, 3, 7, 40, 1000] {
            let (kept, code) = filtered(&mark, stream.as_bytes(), size);
            assert_eq!(
                String::from_utf8(kept).unwrap(),
                "error\n\nwardian-end-later",
                "{size}"
            );
            assert_eq!(code, Some(7));
        }
        let (kept, code) = filtered(&mark, b"nothing of it\n", 3);
        assert_eq!((kept.as_slice(), code), (&b"nothing of it\n"[..], None));
    }

    #[test]
    fn a_shell_writes_it_and_ends_as_the_program_did() {
        let mark = Mark::new();
        for (program, expected) in [("true", 0), ("exit 7", 7), ("kill -TERM $$", 143)] {
            let script = format!("/bin/sh -c '{program}'\n{}", mark.script());
            let output = std::process::Command::new("/bin/sh")
                .args(["-c", &script])
                .output()
                .unwrap();
            assert_eq!(output.status.code(), Some(expected), "{program}");
            let (kept, code) = filtered(&mark, &output.stderr, 16);
            assert_eq!(code, Some(expected));
            let kept = String::from_utf8(kept).unwrap();
            assert!(!kept.contains("wardian"), "{kept}");
        }
    }
}
