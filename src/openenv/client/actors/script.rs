//! Lines of a shell that run a command and print its streams, and what is read of them.
//!
//! What a tool gives back is text, with words of its own around it perhaps. So a line prints a *frame*: its mark with
//! three numbers (exit code, and sizes of the two streams), a line of base64 for each stream, and the mark again. A
//! guest can forge a frame of its own machine's, as it can replace the shell; that is all it has by it.

use std::collections::BTreeMap;
use std::path::Path;

use super::base64::decode;
use crate::actor::ActorError;
use crate::actor::image::base64;
use crate::actor::script::{setting, words};

/// The least output of a call that lets anything come back.
pub(super) const MIN_OUTPUT: usize = 1 << 10;

/// The longest line that is sent at once: Linux takes no argument of 128 KiB.
pub(super) const MAX_LINE: usize = 60 << 10;

/// What a frame has besides its streams, at most, and what a tool may say around it.
const AROUND: usize = 512;

/// Files of the two streams, in the folder of an actor.
const STREAMS: [&str; 2] = ["out", "err"];

/// A folder of a machine for what commands read and print.
#[derive(Debug)]
pub(super) struct Place {
    folder: String,
    mark: String,
    /// The most of both streams that one frame has, in bytes.
    piece: usize,
}

/// What a line printed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) code: i32,
    /// How much each stream has.
    pub(super) sizes: [u64; 2],
    /// What of it is here.
    pub(super) streams: [Vec<u8>; 2],
}

impl Place {
    /// Names one whose frames are in at most `max_output` bytes of text.
    pub(super) fn new(max_output: usize) -> Self {
        let name: u128 = rand::random();
        Self {
            folder: format!("/tmp/.wardian-{name:032x}"),
            mark: format!("wardian-{:032x}", rand::random::<u128>()),
            piece: max_output.saturating_sub(AROUND) / 4 * 3,
        }
    }

    /// Returns what makes the folder and those of an actor, and prints who runs commands.
    pub(super) fn begin(&self, folders: &[&Path]) -> Result<String, ActorError> {
        let mut names = Vec::new();
        for folder in folders {
            let name = folder.to_str().ok_or_else(|| ActorError::InvalidSpec {
                reason: format!("`{}` is not UTF-8", folder.display()),
            })?;
            names.push(name.to_owned());
        }
        let script = format!(
            "umask 022\n(id -u && id -g || exit 1\nfor f in {}; do mkdir -p \"$f\" && [ -w \"$f\" ] || \
             {{ echo \"$f cannot be written\" >&2; exit 1; }}; done\n\
             command -v tar >/dev/null || {{ echo 'there is no tar' >&2; exit 1; }})",
            words(&names)
        );
        let folder = &self.folder;
        Ok(format!(
            "(umask 077; mkdir {folder})\n{}",
            self.framed(&script)
        ))
    }

    /// Returns what makes a stream that is as long as a piece.
    pub(super) fn fill(&self) -> String {
        let out = self.file(STREAMS[0]);
        self.silent(&format!("head -c {} /dev/zero >{out}", self.piece))
    }

    /// Returns what runs a command whose input was brought before, if it has one.
    pub(super) fn run(
        &self,
        argv: &[String],
        cwd: &Path,
        env: &BTreeMap<String, String>,
        open_files: u32,
        has_input: bool,
    ) -> Result<String, ActorError> {
        let input = match has_input {
            true => self.file("in"),
            false => "/dev/null".to_owned(),
        };
        let setting = setting(cwd, env, open_files)?.join("\n");
        Ok(self.framed(&format!(
            "umask 022\n({setting}\nexec {} <{input})",
            words(argv)
        )))
    }

    /// Returns what runs a script that was brought before.
    pub(super) fn run_file(&self, name: &str) -> String {
        format!(". {}", self.file(name))
    }

    /// Returns what empties a file that is to be brought.
    pub(super) fn empty(&self, name: &str) -> String {
        self.silent(&format!(": >{}", self.file(name)))
    }

    /// Returns what adds to it, in pieces.
    pub(super) fn add<'a>(
        &'a self,
        name: &str,
        bytes: &'a [u8],
    ) -> impl Iterator<Item = String> + 'a {
        let file = self.file(name);
        let pieces = bytes.chunks(MAX_LINE / 4 * 3 - AROUND);
        pieces.map(move |piece| {
            let text = base64(piece);
            self.silent(&format!("printf %s {text} | base64 -d >>{file}"))
        })
    }

    /// Returns how long a piece of a stream is at most, in bytes.
    pub(super) fn piece(&self) -> usize {
        self.piece
    }

    /// Returns what prints a piece of one stream from an offset on, as the first of a frame.
    pub(super) fn piece_at(&self, stream: usize, offset: u64) -> String {
        let file = self.file(STREAMS[stream]);
        format!(
            "printf '\\n%s 0 0 0\\n' {mark}\ntail -c +{} {file} | head -c {} | base64 | tr -d '\\n'\n\
             printf '\\n\\n%s\\n' {mark}",
            offset + 1,
            self.piece,
            mark = self.mark
        )
    }

    /// Returns what deletes the folder.
    pub(super) fn end(&self) -> String {
        format!("rm -rf {}", self.folder)
    }

    /// Returns what does something, whose streams and code are framed.
    fn framed(&self, script: &str) -> String {
        let [out, err] = STREAMS.map(|stream| self.file(stream));
        format!(
            "{{ {script}\n}} >{out} 2>{err}\ncode=$?\n{}",
            self.report("\"$code\"")
        )
    }

    /// As [`Self::framed`], with nothing but the code.
    fn silent(&self, script: &str) -> String {
        format!(
            "{{ {script}\n}} >/dev/null 2>&1\nprintf '\\n%s %s 0 0\\n\\n\\n%s\\n' {mark} \"$?\" {mark}",
            mark = self.mark
        )
    }

    /// Returns what prints how much each stream of the last command has, and their beginnings.
    pub(super) fn report(&self, code: &str) -> String {
        let [out, err] = STREAMS.map(|stream| self.file(stream));
        let half = self.piece / 2;
        format!(
            "printf '\\n%s %s %s %s\\n' {mark} {code} \"$(wc -c <{out})\" \"$(wc -c <{err})\"\n\
             head -c {half} {out} | base64 | tr -d '\\n'\necho\n\
             head -c {half} {err} | base64 | tr -d '\\n'\nprintf '\\n%s\\n' {mark}",
            mark = self.mark
        )
    }

    fn file(&self, name: &str) -> String {
        format!("{}/{name}", self.folder)
    }

    /// Reads the frame in what a tool gave back; none where there is none, or not all of it.
    pub(super) fn read(&self, text: &str) -> Option<Frame> {
        // A tool may repeat the line, in which the mark is, too.
        text.match_indices(&self.mark).find_map(|(at, mark)| {
            let mut lines = text[at + mark.len()..].lines();
            let mut numbers = lines.next()?.split_ascii_whitespace();
            let code = numbers.next()?.parse().ok()?;
            let sizes = [numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?];
            let mut stream = || decode(lines.next()?.trim_end());
            let streams = [stream()?, stream()?];
            let is_whole = lines.next()?.trim_end() == self.mark;
            (is_whole && numbers.next().is_none()).then_some(Frame {
                code,
                sizes,
                streams,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn sh(line: &str) -> String {
        let output = Command::new("/bin/sh").args(["-c", line]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    fn run(place: &Place, script: &str) -> Frame {
        let argv = ["/bin/sh", "-c", script].map(str::to_owned);
        let line = place.run(&argv, Path::new("/"), &BTreeMap::new(), 64, false);
        place.read(&sh(&line.unwrap())).unwrap()
    }

    fn place() -> Place {
        let place = Place::new(4096);
        let began = place.read(&sh(&place.begin(&[Path::new("/tmp")]).unwrap()));
        assert_eq!(began.unwrap().code, 0);
        place
    }

    #[test]
    fn streams_and_codes_come_back() {
        let place = place();
        let frame = run(&place, "printf 'a\\0b'; echo e >&2; exit 7");
        assert_eq!((frame.code, frame.sizes), (7, [3, 2]));
        assert_eq!(frame.streams, [b"a\0b".to_vec(), b"e\n".to_vec()]);
        // A stream that is longer than a frame comes in pieces.
        let frame = run(&place, "seq 10000");
        assert!(frame.sizes[0] > frame.streams[0].len() as u64);
        let mut whole = Vec::new();
        while (whole.len() as u64) < frame.sizes[0] {
            let piece = place.read(&sh(&place.piece_at(0, whole.len() as u64)));
            let [bytes, _] = piece.unwrap().streams;
            assert!(!bytes.is_empty() && bytes.len() <= place.piece());
            whole.extend(bytes);
        }
        let expected: String = (1..=10_000).map(|number| format!("{number}\n")).collect();
        assert_eq!(whole, expected.as_bytes());
        sh(&place.end());
        assert!(!Path::new(&place.folder).exists());
    }

    #[test]
    fn what_is_brought_arrives_as_it_is() {
        let place = place();
        let bytes: Vec<u8> = (0..=255).cycle().take(200_000).collect();
        sh(&place.empty("in"));
        for line in place.add("in", &bytes) {
            assert!(line.len() <= MAX_LINE, "{}", line.len());
            assert_eq!(place.read(&sh(&line)).unwrap().code, 0);
        }
        assert_eq!(fs_err::read(place.file("in")).unwrap(), bytes);
        sh(&place.end());
    }

    #[test]
    fn a_frame_is_found_among_other_words_and_only_whole() {
        let place = Place::new(4096);
        let mark = &place.mark;
        let frame = format!("{mark} 3 1 0\nYQ==\n\n{mark}");
        let expected = Frame {
            code: 3,
            sizes: [1, 0],
            streams: [b"a".to_vec(), Vec::new()],
        };
        for text in [
            frame.clone(),
            format!("$ printf {mark} \"$code\"\nnoise\n{frame}\n(exit code 3)"),
            frame.replace('\n', "\r\n"),
        ] {
            assert_eq!(place.read(&text).as_ref(), Some(&expected), "{text}");
        }
        for text in [
            String::new(),
            format!("{mark} 3 1"),
            format!("{mark} 3 1 0\nYQ==\n\n"),
            format!("{mark} 3 1 0\n[cut]\n\n{mark}"),
            frame.replace(" 3 1 0", " 3 1 0 0"),
            frame.replace(mark, "wardian-0"),
        ] {
            assert_eq!(place.read(&text), None, "{text}");
        }
    }
}
