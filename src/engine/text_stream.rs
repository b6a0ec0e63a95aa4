//! The text of a turn while its tokens arrive, up to a stop string.

use super::{Detokenizer, EngineError, Tokenizer};

/// Where the text of a turn is cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StopText {
    /// The string that was found.
    pub text: String,
    /// Byte at which it begins in the text of the turn's tokens: the turn's text ends there.
    pub at: usize,
}

/// Turns a turn's ids into text and looks for stop strings across their borders.
///
/// Text that may be the beginning of a stop string is held back until it is none.
///
/// ```
/// use wardian::engine::{TextStream, Tokenizer};
///
/// let tokenizer = Tokenizer::byte_level(&[])?;
/// let mut stream = TextStream::new(&tokenizer, &["##".to_owned()]);
/// assert_eq!(stream.push(u32::from(b'a'))?, ("a".to_owned(), None));
/// assert_eq!(stream.push(u32::from(b'#'))?, (String::new(), None));
/// let (text, stop) = stream.push(u32::from(b'#'))?;
/// assert_eq!((text.as_str(), stop.map(|stop| stop.at)), ("", Some(1)));
/// # Ok::<(), wardian::engine::EngineError>(())
/// ```
#[derive(Debug)]
pub struct TextStream {
    detokenizer: Detokenizer,
    stop: Vec<String>,
    /// Text that is not handed over yet.
    held: String,
    /// Bytes that were handed over.
    returned: usize,
}

impl TextStream {
    /// Returns a stream at the start of a turn.
    pub fn new(tokenizer: &Tokenizer, stop: &[String]) -> Self {
        Self {
            detokenizer: tokenizer.detokenizer(),
            stop: stop.to_vec(),
            held: String::new(),
            returned: 0,
        }
    }

    /// Takes the next token; returns the text that it settles, and the stop string that ends it, if
    /// one does. Nothing is to be pushed after that.
    ///
    /// # Errors
    ///
    /// Fails if the tokenizer's decoder does.
    pub fn push(&mut self, id: u32) -> Result<(String, Option<StopText>), EngineError> {
        let piece = self.detokenizer.push(id)?;
        self.held.push_str(&piece);
        let found = self
            .stop
            .iter()
            .filter_map(|stop| Some((self.held.find(stop.as_str())?, stop)))
            .min_by_key(|&(at, stop)| (at, std::cmp::Reverse(stop.len())));
        if let Some((at, stop)) = found {
            let stop = StopText {
                text: stop.clone(),
                at: self.returned + at,
            };
            self.held.truncate(at);
            return Ok((self.take(at), Some(stop)));
        }
        Ok((self.take(self.held.len() - self.undecided()), None))
    }

    /// Takes the next token of a turn that may not stop yet.
    ///
    /// # Errors
    ///
    /// Fails if the tokenizer's decoder does.
    pub fn push_unstoppable(&mut self, id: u32) -> Result<String, EngineError> {
        let piece = self.detokenizer.push(id)?;
        self.held.push_str(&piece);
        Ok(self.take(self.held.len() - self.undecided()))
    }

    /// Returns the text that is still held back.
    ///
    /// # Errors
    ///
    /// Fails if the tokenizer's decoder does.
    pub fn finish(self) -> Result<String, EngineError> {
        Ok(self.held + &self.detokenizer.finish()?)
    }

    /// Hands over the first bytes of what is held.
    fn take(&mut self, bytes: usize) -> String {
        let rest = self.held.split_off(bytes);
        self.returned += bytes;
        std::mem::replace(&mut self.held, rest)
    }

    /// Returns how many of the last held bytes may begin a stop string.
    fn undecided(&self) -> usize {
        let longest = |stop: &String| {
            self.held
                .char_indices()
                .map(|(start, _)| &self.held[start..])
                .find(|end| end.len() < stop.len() && stop.starts_with(end))
                .map_or(0, str::len)
        };
        self.stop.iter().map(longest).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Feeds the bytes of `text`; returns the settled text and the stop.
    fn feed(text: &str, stop: &[&str]) -> (String, Option<StopText>) {
        let tokenizer = Tokenizer::byte_level(&[]).unwrap();
        let stop: Vec<String> = stop.iter().map(|&stop| stop.to_owned()).collect();
        let mut stream = TextStream::new(&tokenizer, &stop);
        let mut all = String::new();
        for byte in text.bytes() {
            let (piece, found) = stream.push(u32::from(byte)).unwrap();
            all += &piece;
            if found.is_some() {
                return (all, found);
            }
        }
        (all + &stream.finish().unwrap(), None)
    }

    #[test]
    fn the_first_string_to_be_complete_cuts_the_text() {
        let (text, stop) = feed("one\nEND two", &["END", "\nE"]);
        assert_eq!(text, "one");
        assert_eq!(
            stop,
            Some(StopText {
                text: "\nE".to_owned(),
                at: 3
            })
        );
    }

    #[test]
    fn a_beginning_that_comes_to_nothing_is_text() {
        assert_eq!(feed("aaab ENX", &["aab", "END"]).0, "a");
        assert_eq!(feed("a EN", &["END"]), ("a EN".to_owned(), None));
        assert_eq!(feed("EEND", &["END"]).0, "E");
    }

    #[test]
    fn a_string_may_span_parts_of_characters() {
        let (text, stop) = feed("héé!", &["éé"]);
        assert_eq!((text.as_str(), stop.unwrap().at), ("h", 1));
    }

    proptest! {
        /// The text is cut where a search in the whole text would cut it, and nothing is lost.
        #[test]
        fn streaming_finds_what_a_search_finds(
            text in "[abé]{0,24}",
            stop in prop::collection::vec("[abé]{1,4}", 0..4),
        ) {
            let stop: Vec<&str> = stop.iter().map(String::as_str).collect();
            let (streamed, found) = feed(&text, &stop);
            // The match that is complete first wins; of those, the one that begins first.
            let first = (0..=text.len()).filter(|&end| text.is_char_boundary(end)).find_map(|end| {
                stop.iter().filter_map(|stop| text[..end].find(stop)).min()
            });
            prop_assert_eq!(found.map(|stop| stop.at), first);
            prop_assert_eq!(streamed.as_str(), &text[..first.unwrap_or(text.len())]);
        }
    }
}
