//! `TensorBoard`'s event files.
//!
//! A file is a sequence of records: the length (u64, little endian), its masked CRC-32C, the data
//! and the data's masked CRC-32C. Each is an `Event` in Protocol Buffers. Source: the descriptions
//! of `tfrecord` and of `event.proto` and `summary.proto` in TensorFlow's documentation.

use std::io::Write as _;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use fs_err as fs;
use prost::Message;

use super::{Row, Sink, scalars};

/// `tensorflow.Event`, what we use of it.
#[derive(Clone, PartialEq, Message)]
struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    /// In the first event of a file.
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<EventSummary>,
}

/// `tensorflow.Summary`.
#[derive(Clone, PartialEq, Message)]
struct EventSummary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<EventValue>,
}

/// `tensorflow.Summary.Value`.
#[derive(Clone, PartialEq, Message)]
struct EventValue {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, tag = "2")]
    simple_value: f32,
}

/// The event file of a run: `tensorboard/events.out.tfevents.wardian`.
#[derive(Debug)]
pub(super) struct TensorBoard {
    file: fs::File,
    failed: bool,
}

impl TensorBoard {
    /// Starts the file anew.
    ///
    /// # Errors
    ///
    /// Fails where the file cannot be written.
    pub(super) fn create(run: &Path) -> std::io::Result<Self> {
        let folder = run.join("tensorboard");
        fs::create_dir_all(&folder)?;
        let mut file = fs::File::create(folder.join("events.out.tfevents.wardian"))?;
        let version = Event {
            wall_time: now(),
            file_version: Some("brain.Event:2".to_owned()),
            ..Event::default()
        };
        file.write_all(&record(&version))?;
        Ok(Self {
            file,
            failed: false,
        })
    }
}

impl Sink for TensorBoard {
    fn log(&mut self, row: &Row) {
        let Some((step, numbers)) = scalars(row) else {
            return;
        };
        #[expect(clippy::cast_possible_truncation, reason = "the format has f32")]
        let value = |(name, value): (&str, f64)| EventValue {
            tag: name.to_owned(),
            simple_value: value as f32,
        };
        let event = Event {
            wall_time: now(),
            step: i64::try_from(step).unwrap_or(i64::MAX),
            summary: Some(EventSummary {
                value: numbers.map(value).collect(),
            }),
            ..Event::default()
        };
        if let Err(error) = self.file.write_all(&record(&event))
            && !std::mem::replace(&mut self.failed, true)
        {
            tracing::warn!(%error, "TensorBoard's file misses rows from here on");
        }
    }
}

fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0.0, |elapsed| elapsed.as_secs_f64())
}

fn record(event: &Event) -> Vec<u8> {
    let data = event.encode_to_vec();
    let length = (data.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(data.len() + 16);
    record.extend(length);
    record.extend(masked_crc(&length).to_le_bytes());
    record.extend(&data);
    record.extend(masked_crc(&data).to_le_bytes());
    record
}

/// A CRC of data that holds CRCs is weak, so the format rotates it and adds a constant.
fn masked_crc(data: &[u8]) -> u32 {
    let crc = crc32c::crc32c(data);
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads the events of a file, checking both sums of each.
    fn read(bytes: &[u8]) -> Vec<Event> {
        let mut rest = bytes;
        let mut events = Vec::new();
        let sum = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
        while !rest.is_empty() {
            let (length, tail) = rest.split_at(8);
            assert_eq!(sum(&tail[..4]), masked_crc(length));
            let size = usize::try_from(u64::from_le_bytes(length.try_into().unwrap())).unwrap();
            let (data, tail) = tail[4..].split_at(size);
            assert_eq!(sum(&tail[..4]), masked_crc(data));
            events.push(Event::decode(data).unwrap());
            rest = &tail[4..];
        }
        events
    }

    #[test]
    fn the_sum_is_that_of_the_format() {
        // RFC 3720, appendix B.4: 32 bytes of zeros have the CRC-32C 0x8a9136aa.
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
        let rotated = 0x8a91_36aa_u32.rotate_right(15);
        assert_eq!(masked_crc(&[0; 32]), rotated.wrapping_add(0xa282_ead8));
    }

    #[test]
    fn rows_become_events() {
        let run = tempfile::tempdir().unwrap();
        let mut sink = TensorBoard::create(run.path()).unwrap();
        for row in [
            serde_json::json!({"step": 1, "reward": 0.5, "eval/ci95": [0.0, 1.0]}),
            serde_json::json!({"step": 2, "reward": 0.75, "loss": null}),
            serde_json::json!({"note": "no step"}),
        ] {
            sink.log(row.as_object().unwrap());
        }
        let path = run.path().join("tensorboard/events.out.tfevents.wardian");
        let events = read(&fs::read(path).unwrap());
        assert_eq!(events[0].file_version.as_deref(), Some("brain.Event:2"));
        let found: Vec<(i64, Vec<(&str, f32)>)> = events[1..]
            .iter()
            .map(|event| {
                let values = event.summary.iter().flat_map(|summary| &summary.value);
                (
                    event.step,
                    values
                        .map(|value| (value.tag.as_str(), value.simple_value))
                        .collect(),
                )
            })
            .collect();
        assert_eq!(
            found,
            [(1, vec![("reward", 0.5)]), (2, vec![("reward", 0.75)])]
        );
    }
}
