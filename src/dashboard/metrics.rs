//! Rows of `metrics.jsonl` from a place in the file on, and its last ones.
//!
//! The file grows by whole lines while it is read. A run that goes on from a checkpoint replaces it by a
//! shorter one under the same name, so a place is told with the file that it is in.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::MetadataExt as _;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Most bytes that are read at a time.
const MAX_READ: u64 = 1 << 20;
/// What is read from the end to find the last rows.
const TAIL: u64 = 256 << 10;

/// One row.
pub(super) type Row = Map<String, Value>;

/// A place in a file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(super) struct Place {
    /// Which file: what a file system calls it; 0 is none. A text, since a page knows no number of 64 bits.
    #[serde(serialize_with = "as_text")]
    pub(super) file: u64,
    /// Bytes before it.
    pub(super) offset: u64,
}

fn as_text<S: serde::Serializer>(number: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(number)
}

/// What was logged behind a place.
#[derive(Debug, Serialize)]
pub(super) struct Rows {
    /// A JSON list of them, as they are written.
    #[serde(skip)]
    rows: String,
    /// Lines that are no rows.
    pub(super) broken: usize,
    /// Where the next rows will be.
    #[serde(flatten)]
    pub(super) next: Place,
    /// Whether the rows are those from the beginning on, because the file is another than before.
    pub(super) is_anew: bool,
    /// Whether there is more to be had at once.
    pub(super) has_more: bool,
}

impl Rows {
    /// What is told where nothing was logged yet.
    pub(super) fn none() -> Self {
        Self {
            rows: "[]".to_owned(),
            broken: 0,
            next: Place::default(),
            is_anew: true,
            has_more: false,
        }
    }

    /// Returns all of it as JSON.
    pub(super) fn json(&self) -> Result<Vec<u8>, serde_json::Error> {
        let about = serde_json::to_string(self)?;
        // The rows are put there as they are: reading and writing them once more takes ten times their memory.
        let rest = about.strip_prefix('{').unwrap_or(&about);
        Ok(format!("{{\"rows\":{},{rest}", self.rows).into_bytes())
    }
}

/// What is asked of a row.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Head {
    step: u64,
    #[serde(rename = "eval/pass_at_1")]
    pass_at_1: Option<IgnoredAny>,
}

/// Reads rows behind `from`; of those of steps every `every`-th alone, and all others.
pub(super) fn read_rows(file: &mut File, from: Place, every: u64) -> io::Result<Rows> {
    let about = file.metadata()?;
    let is_same = from.file == about.ino() && from.offset <= about.len();
    let start = if is_same { from.offset } else { 0 };
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(MAX_READ).read_to_end(&mut bytes)?;
    let is_full = bytes.len() as u64 == MAX_READ;
    // A last line without an end is still being written; one longer than all that is read at a time is
    // none of ours.
    let whole = match bytes.iter().rposition(|byte| *byte == b'\n') {
        Some(end) => end + 1,
        None if is_full => bytes.len(),
        None => 0,
    };
    let (rows, broken) = choose(&bytes[..whole], every);
    Ok(Rows {
        rows,
        broken,
        next: Place {
            file: about.ino(),
            offset: start + whole as u64,
        },
        is_anew: !is_same,
        has_more: is_full,
    })
}

/// Returns the last rows, in order: as many as are in the file's last bytes.
pub(super) fn last_rows(file: &mut File) -> io::Result<Vec<Row>> {
    let length = file.metadata()?.len();
    let start = length.saturating_sub(TAIL);
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(TAIL).read_to_end(&mut bytes)?;
    let end = bytes.iter().rposition(|byte| *byte == b'\n');
    let whole = &bytes[..end.map_or(0, |end| end + 1)];
    let begin = match start {
        0 => 0,
        // The first line may have begun before.
        _ => (whole.iter().position(|byte| *byte == b'\n')).map_or(whole.len(), |end| end + 1),
    };
    let rows = lines(&whole[begin..]).filter_map(|line| serde_json::from_slice(line).ok());
    Ok(rows.collect())
}

fn lines(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let lines = bytes.split(|byte| *byte == b'\n');
    lines
        .map(<[u8]>::trim_ascii)
        .filter(|line| !line.is_empty())
}

/// Returns the rows that are shown as a JSON list, and how many lines are none.
fn choose(bytes: &[u8], every: u64) -> (String, usize) {
    let (mut rows, mut broken) = ("[".to_owned(), 0);
    for line in lines(bytes) {
        // A list would do for a struct, too.
        let head = std::str::from_utf8(line)
            .ok()
            .filter(|line| line.starts_with('{'));
        let head = head.and_then(|line| Some((line, serde_json::from_str::<Head>(line).ok()?)));
        match head {
            Some((line, head)) if is_shown(&head, every) => {
                if rows.len() > 1 {
                    rows.push(',');
                }
                rows.push_str(line);
            }
            Some(_) => {}
            None => broken += 1,
        }
    }
    rows.push(']');
    (rows, broken)
}

/// Returns whether a row is that of a measurement, of one of the first steps, or of an `every`-th.
fn is_shown(head: &Head, every: u64) -> bool {
    head.step <= 1 || head.step.is_multiple_of(every.max(1)) || head.pass_at_1.is_some()
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn steps(rows: &[Row]) -> Vec<u64> {
        rows.iter().filter_map(|row| row["step"].as_u64()).collect()
    }

    fn told(rows: &Rows) -> Vec<u64> {
        let told: Value = serde_json::from_slice(&rows.json().unwrap()).unwrap();
        assert_eq!(told["offset"], rows.next.offset);
        let rows = told["rows"].as_array().unwrap();
        rows.iter().filter_map(|row| row["step"].as_u64()).collect()
    }

    #[test]
    fn rows_come_as_they_are_written_and_a_torn_one_once_it_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut writer = fs_err::File::create(&path).unwrap();
        let read =
            |from| read_rows(fs_err::File::open(&path).unwrap().file_mut(), from, 1).unwrap();
        writer.write_all(b"{\"step\":1}\n{\"st").unwrap();
        let first = read(Place::default());
        assert_eq!((told(&first), first.broken), (vec![1], 0));
        assert!(first.is_anew && !first.has_more);
        let second = read(first.next);
        assert!(told(&second).is_empty() && !second.is_anew);
        writer
            .write_all(b"ep\":2}\n[]\nnone\n{\"step\":3}\n")
            .unwrap();
        let third = read(second.next);
        assert_eq!((told(&third), third.broken), (vec![2, 3], 2));
    }

    #[test]
    fn a_file_in_another_s_place_is_read_from_its_beginning() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        fs_err::write(&path, "{\"step\":1}\n{\"step\":2}\n").unwrap();
        let read =
            |from| read_rows(fs_err::File::open(&path).unwrap().file_mut(), from, 1).unwrap();
        let first = read(Place::default());
        // As long as the other, so that its length alone would not tell.
        let other = folder.path().join("other");
        fs_err::write(&other, "{\"step\":1}\n{\"step\":9}\n").unwrap();
        fs_err::rename(&other, &path).unwrap();
        let again = read(first.next);
        assert_eq!(told(&again), [1, 9]);
        assert!(again.is_anew);
    }

    #[test]
    fn a_long_run_is_thinned_and_keeps_its_measurements() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let rows: String = (1..=10)
            .map(|step| format!("{{\"step\":{step}}}\n"))
            .collect();
        fs_err::write(&path, rows + "{\"step\":7,\"eval/pass_at_1\":1}\n").unwrap();
        let found = read_rows(
            fs_err::File::open(&path).unwrap().file_mut(),
            Place::default(),
            5,
        )
        .unwrap();
        assert_eq!(told(&found), [1, 5, 10, 7]);
    }

    #[test]
    fn the_last_rows_are_found_without_reading_the_others() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let rows: String = (1..=20_000)
            .map(|step| format!("{{\"step\":{step},\"reward\":0.25}}\n"))
            .collect();
        fs_err::write(&path, rows + "{\"step\":20001,\"re").unwrap();
        let found = last_rows(fs_err::File::open(&path).unwrap().file_mut()).unwrap();
        assert_eq!(steps(&found).last(), Some(&20_000));
        assert!(found.len() > 100 && found.len() < 20_000);
    }
}
