//! Server-sent events, read as they come (WHATWG HTML, section 9.2.6).

/// An event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SseEvent {
    /// Its type; empty for a plain message.
    pub name: String,
    /// Its data, the lines joined.
    pub data: String,
}

/// Why a stream cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SseError {
    /// An event is longer than any that is read.
    #[error("an event has more than {limit} bytes")]
    TooLong {
        /// The longest event that is read.
        limit: usize,
    },
    /// The stream ends within an event.
    #[error("the stream ends within an event")]
    Unfinished,
}

/// Reads events from bytes that come in pieces of any size.
///
/// Lines end in a line feed, a carriage return or both. Comments, ids and times to wait are read over;
/// bytes that are no UTF-8 are replaced. An event without data is none.
///
/// ```
/// use wardian::proxy::SseParser;
///
/// let mut parser = SseParser::new(1024);
/// assert_eq!(parser.push(b"data: a\ndata:b\n\ndata: c")?[0].data, "a\nb");
/// assert_eq!(parser.push(b"\r\n\r\n")?[0].data, "c");
/// parser.finish()?;
/// # Ok::<(), wardian::proxy::SseError>(())
/// ```
#[derive(Debug)]
pub struct SseParser {
    limit: usize,
    /// The line that has not ended yet.
    line: Vec<u8>,
    name: String,
    data: Option<String>,
    /// Whether the last byte was a carriage return, which a line feed may follow.
    is_after_return: bool,
    is_first_line: bool,
}

impl SseParser {
    /// Returns a parser of events of up to `limit` bytes.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            line: Vec::new(),
            name: String::new(),
            data: None,
            is_after_return: false,
            is_first_line: true,
        }
    }

    /// Takes the next bytes; returns the events that they end.
    ///
    /// # Errors
    ///
    /// [`SseError::TooLong`] if an event is. The parser is of no use then.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<SseEvent>, SseError> {
        let mut events = Vec::new();
        for &byte in bytes {
            let is_second_half = self.is_after_return && byte == b'\n';
            self.is_after_return = byte == b'\r';
            if is_second_half {
                continue;
            }
            if byte == b'\r' || byte == b'\n' {
                events.extend(self.end_line());
                continue;
            }
            let held =
                self.line.len() + self.name.len() + self.data.as_ref().map_or(0, String::len);
            if held >= self.limit {
                return Err(SseError::TooLong { limit: self.limit });
            }
            self.line.push(byte);
        }
        Ok(events)
    }

    /// Ends the stream.
    ///
    /// # Errors
    ///
    /// [`SseError::Unfinished`] if an event has begun and not ended.
    pub fn finish(self) -> Result<(), SseError> {
        match self.line.is_empty() && self.data.is_none() {
            true => Ok(()),
            false => Err(SseError::Unfinished),
        }
    }

    fn end_line(&mut self) -> Option<SseEvent> {
        let bytes = std::mem::take(&mut self.line);
        let line = String::from_utf8_lossy(&bytes);
        let mut line = &*line;
        if std::mem::take(&mut self.is_first_line) {
            line = line.strip_prefix('\u{feff}').unwrap_or(line);
        }
        if line.is_empty() {
            let name = std::mem::take(&mut self.name);
            let data = self.data.take()?;
            return Some(SseEvent { name, data });
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "event" => value.clone_into(&mut self.name),
            "data" => match &mut self.data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(value);
                }
                None => self.data = Some(value.to_owned()),
            },
            _ => {}
        }
        None
    }
}

/// Reads a stream whole and in pieces: both give the same, and no event is longer than the limit lets
/// it be. The first two bytes say how long the pieces are and what the limit is.
///
/// # Panics
///
/// Where that does not hold.
#[cfg(any(fuzzing, test))]
pub fn fuzz_sse(bytes: &[u8]) {
    let [piece, limit, stream @ ..] = bytes else {
        return;
    };
    let limit = usize::from(*limit) + 1;
    let read = |piece: usize| {
        let mut parser = SseParser::new(limit);
        let mut events = Vec::new();
        for piece in stream.chunks(piece.max(1)) {
            events.extend(parser.push(piece).map_err(|error| (events.len(), error))?);
        }
        let end = parser.finish();
        Ok::<_, (usize, SseError)>((events, end))
    };
    let whole = read(stream.len());
    match (&whole, read(usize::from(*piece))) {
        (Ok(whole), Ok(pieces)) => assert_eq!(whole, &pieces, "pieces give other events"),
        (Err((_, whole)), Err((_, pieces))) => assert_eq!(*whole, pieces),
        (whole, pieces) => panic!("{whole:?} in one piece is {pieces:?} in several"),
    }
    if let Ok((events, _)) = whole {
        for event in &events {
            // A replaced byte takes three.
            let length = event.name.len() + event.data.len();
            assert!(length <= 3 * limit + 1, "an event of {length} bytes");
        }
        // What was read is written, and read the same.
        let written: String = events
            .iter()
            .map(|event| {
                let data = event.data.replace('\n', "\ndata: ");
                format!("event: {}\ndata: {data}\n\n", event.name)
            })
            .collect();
        let mut parser = SseParser::new(usize::MAX);
        assert_eq!(parser.push(written.as_bytes()).as_ref(), Ok(&events));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn data(stream: &str) -> Vec<String> {
        let mut parser = SseParser::new(1 << 16);
        let events = parser.push(stream.as_bytes()).unwrap();
        events.into_iter().map(|event| event.data).collect()
    }

    #[test]
    fn events_are_read_in_every_spelling() {
        assert_eq!(
            data("data: a\n\ndata: b\r\rdata:c\r\n\r\n"),
            ["a", "b", "c"]
        );
        assert_eq!(data("\u{feff}data:  two spaces\n\n"), [" two spaces"]);
        assert_eq!(
            data(": comment\nid: 1\nretry: 5\ndata\ndata: x\n\n"),
            ["\nx"]
        );
        assert_eq!(data("event: ping\n\n\n\n"), Vec::<String>::new());
        let mut parser = SseParser::new(1 << 16);
        let events = parser.push(b"event: e\ndata: {}\n\ndata: 1\n\n").unwrap();
        assert_eq!(events[0].name, "e");
        assert_eq!(events[1].name, "", "a type is of one event only");
    }

    #[test]
    fn what_is_broken_is_said() {
        let mut parser = SseParser::new(8);
        let error = parser.push(b"data: 0123456789").unwrap_err();
        assert_eq!(error.to_string(), "an event has more than 8 bytes");
        let mut parser = SseParser::new(16);
        // Many short lines are one long event, too.
        let long = b"data: 1\n".repeat(32);
        parser.push(&long).unwrap_err();
        let mut parser = SseParser::new(64);
        parser.push(b"data: half\n").unwrap();
        assert_eq!(parser.finish(), Err(SseError::Unfinished));
        let mut parser = SseParser::new(64);
        parser.push(b"data: \xff\n\n").unwrap();
        assert_eq!(parser.finish(), Ok(()));
    }

    #[test]
    fn the_seeds_of_the_fuzz_target_are_read() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds/sse_stream");
        let entries = fs_err::read_dir(folder).unwrap();
        let seeds: Vec<Vec<u8>> = entries
            .map(|entry| fs_err::read(entry.unwrap().path()).unwrap())
            .collect();
        assert_eq!(seeds.len(), 3);
        for seed in seeds {
            fuzz_sse(&seed);
        }
    }

    proptest! {
        #[test]
        fn a_stream_may_come_in_any_pieces(
            bytes in proptest::collection::vec(
                prop_oneof![
                    Just(b'\n'), Just(b'\r'), Just(b':'), Just(b' '), Just(b'd'), any::<u8>(),
                ],
                0..64,
            ),
            text in "(data: ?|event: ?|a|\n|\r|:|é|\u{feff}){0,24}",
        ) {
            fuzz_sse(&bytes);
            fuzz_sse(&[&[3, 255], text.as_bytes()].concat());
            fuzz_sse(&[&[1, 7], text.as_bytes()].concat());
        }
    }
}
