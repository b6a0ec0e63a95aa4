//! Text to token ids and back.
//!
//! Two readings of text exist, and mixing them up lets outside text end a turn:
//!
//! - [`Tokenizer::encode`] reads `<|im_end|>` as the control token. It is for text that we wrote: a
//!   chat template, a test.
//! - [`Tokenizer::encode_ordinary`] reads it as ten or so ordinary characters. It is for tool
//!   results, user content and anything else from outside; no id that it returns is a control
//!   token.
//! - [`Tokenizer::encode_chat`] does the first, except in given ranges: a rendered chat whose
//!   content spells control tokens.
//!
//! None of them adds a begin-of-text token: chat templates write their own.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use fs_err as fs;
use serde_json::{Value, json};
use tokenizers::AddedVocabulary;

use super::EngineError;

/// Largest accepted tokenizer file; Qwen3's has 11 MB, Gemma's 33 MB.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// More tokens than any vocabulary has; the largest have 262,144.
const MAX_TOKENS: u32 = 1 << 22;

/// Names of special tokens in `tokenizer_config.json`.
const SPECIAL_TOKEN_KEYS: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// A tokenizer; cheap to clone and free to share between threads.
///
/// ```
/// use wardian::engine::Tokenizer;
///
/// let tokenizer = Tokenizer::byte_level(&["<|end|>"])?;
/// assert_eq!(tokenizer.encode("hi<|end|>")?, [104, 105, 256]);
/// assert_eq!(tokenizer.encode_ordinary("<|end|>")?.len(), 7);
/// assert_eq!(tokenizer.decode(&[104, 105, 256])?, "hi<|end|>");
/// # Ok::<(), wardian::engine::EngineError>(())
/// ```
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

struct Inner {
    full: tokenizers::Tokenizer,
    /// The same without added tokens, made when first needed: it doubles the vocabulary's memory.
    ordinary: OnceLock<tokenizers::Tokenizer>,
    /// Longest first, so that the first match is the longest.
    added: Vec<AddedToken>,
    special_tokens: BTreeMap<String, String>,
    /// By id; made when first needed.
    token_bytes: OnceLock<Vec<Vec<u8>>>,
    /// Of them; each prompt that is served is compared with it.
    longest_token: OnceLock<usize>,
}

struct AddedToken {
    id: u32,
    content: String,
    special: bool,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("special_tokens", &self.inner.special_tokens)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads `tokenizer.json` and, if it is there, `tokenizer_config.json` of a model folder.
    ///
    /// # Errors
    ///
    /// Fails if `tokenizer.json` is missing, if a file is too large, or if one does not parse: the
    /// message names it.
    pub fn from_folder(folder: &Path) -> Result<Self, EngineError> {
        let path = folder.join("tokenizer.json");
        let bytes = read_bounded(&path, MAX_FILE_BYTES)?;
        let config = read_json(&folder.join("tokenizer_config.json"))?;
        Self::from_bytes(&bytes, config.as_ref(), &path)
    }

    /// Builds a tokenizer from the bytes of a `tokenizer.json` and a parsed `tokenizer_config.json`.
    ///
    /// # Errors
    ///
    /// Fails if it is none.
    pub fn from_json(bytes: &[u8], config: Option<&Value>) -> Result<Self, EngineError> {
        Self::from_bytes(bytes, config, Path::new("tokenizer.json"))
    }

    /// Builds a tokenizer from the bytes of a `tokenizer.json` and a parsed
    /// `tokenizer_config.json`; `path` is for the error message.
    pub(super) fn from_bytes(
        bytes: &[u8],
        config: Option<&Value>,
        path: &Path,
    ) -> Result<Self, EngineError> {
        let damaged = |source| EngineError::TokenizerFile {
            path: path.to_owned(),
            source,
        };
        let read = guarded(|| tokenizers::Tokenizer::from_bytes(bytes));
        let mut full = read.map_err(damaged)?;
        full.with_truncation(None).map_err(damaged)?;
        full.with_padding(None);
        let mut added: Vec<AddedToken> = full
            .get_added_tokens_decoder()
            .into_iter()
            .map(|(id, token)| AddedToken {
                id,
                content: token.content,
                special: token.special,
                single_word: token.single_word,
                lstrip: token.lstrip,
                rstrip: token.rstrip,
            })
            .filter(|token| !token.content.is_empty())
            .collect();
        added.sort_by_key(|token| (std::cmp::Reverse(token.content.len()), token.id));
        let special_tokens = SPECIAL_TOKEN_KEYS
            .into_iter()
            .filter_map(|key| {
                // Either a string or a serialised token.
                let value = config?.get(key)?;
                let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
                Some((key.to_owned(), text.to_owned()))
            })
            .collect();
        let inner = Inner {
            full,
            ordinary: OnceLock::new(),
            added,
            special_tokens,
            token_bytes: OnceLock::new(),
            longest_token: OnceLock::new(),
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// Builds the tokenizer whose ids 0..256 are the bytes of UTF-8, followed by `special` tokens:
    /// no vocabulary to learn, for toy models.
    ///
    /// The last special token is the end-of-text token.
    ///
    /// # Errors
    ///
    /// Fails if a special token occurs twice or is one character.
    pub fn byte_level(special: &[&str]) -> Result<Self, EngineError> {
        let tokens: Vec<String> = (0..=u8::MAX)
            .map(|byte| byte_to_char(byte).to_string())
            .chain(special.iter().map(|token| (*token).to_owned()))
            .collect();
        let special_ids = (256..).zip(special).map(|(id, _)| id).collect();
        let description = BpeDescription {
            tokens,
            merges: Vec::new(),
            special_ids,
            added_ids: Vec::new(),
            pre_tokenizer: PreTokenizer::Bytes,
        };
        let config = special.last().map(|eos| json!({ "eos_token": eos }));
        Self::from_bpe(&description, config.as_ref(), Path::new("byte_level"))
    }

    /// Builds a byte-level BPE tokenizer from its parts.
    pub(super) fn from_bpe(
        description: &BpeDescription,
        config: Option<&Value>,
        path: &Path,
    ) -> Result<Self, EngineError> {
        Self::from_bytes(description.to_json().to_string().as_bytes(), config, path)
    }

    /// Returns the ids of `text`, control tokens included. Only for text that we wrote.
    ///
    /// # Errors
    ///
    /// Fails if the tokenizer's model does.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, EngineError> {
        encode_with(&self.inner.full, text)
    }

    /// Returns the ids of `text` as ordinary text: no added token is recognised in it.
    ///
    /// # Errors
    ///
    /// Fails if the tokenizer's model does.
    pub fn encode_ordinary(&self, text: &str) -> Result<Vec<u32>, EngineError> {
        let holds_added = |token: &AddedToken| text.contains(token.content.as_str());
        if self.inner.added.iter().any(holds_added) {
            encode_with(self.ordinary(), text)
        } else {
            encode_with(&self.inner.full, text)
        }
    }

    /// Returns the ids of a rendered chat: as [`Tokenizer::encode`], except that an added token
    /// which overlaps a range of `literal` is ordinary text.
    ///
    /// `literal` holds byte ranges of `text`, in order.
    ///
    /// # Errors
    ///
    /// Fails if the tokenizer's model does.
    pub fn encode_chat(
        &self,
        text: &str,
        literal: &[Range<usize>],
    ) -> Result<Vec<u32>, EngineError> {
        if literal.is_empty() {
            return self.encode(text);
        }
        let mut ids = Vec::new();
        let mut done = 0;
        let mut at = 0;
        while let Some(character) = text[at..].chars().next() {
            let Some((token, found)) = self.added_token_at(text, at, done, literal) else {
                at += character.len_utf8();
                continue;
            };
            ids.extend(encode_with(self.ordinary(), &text[done..found.start])?);
            ids.push(token.id);
            done = found.end;
            at = found.end;
        }
        ids.extend(encode_with(self.ordinary(), &text[done..])?);
        Ok(ids)
    }

    /// Returns the added token that starts at `at`, and what it covers with the blanks that it
    /// swallows; the text before `done` is taken.
    fn added_token_at(
        &self,
        text: &str,
        at: usize,
        done: usize,
        literal: &[Range<usize>],
    ) -> Option<(&AddedToken, Range<usize>)> {
        self.inner.added.iter().find_map(|token| {
            let after = text[at..].strip_prefix(token.content.as_str())?;
            let end = text.len() - after.len();
            if literal
                .iter()
                .any(|range| range.start < end && at < range.end)
            {
                return None;
            }
            let is_word = |c: char| c.is_alphanumeric() || c == '_';
            if token.single_word && (text[..at].ends_with(is_word) || after.starts_with(is_word)) {
                return None;
            }
            let start = match token.lstrip {
                true => done + text[done..at].trim_end().len(),
                false => at,
            };
            let end = match token.rstrip {
                true => text.len() - after.trim_start().len(),
                false => end,
            };
            Some((token, start..end))
        })
    }

    fn ordinary(&self) -> &tokenizers::Tokenizer {
        self.inner.ordinary.get_or_init(|| {
            let mut ordinary = self.inner.full.clone();
            ordinary.with_added_vocabulary(AddedVocabulary::new());
            ordinary
        })
    }

    /// Returns the text of `ids`, control tokens included. Ids beyond the vocabulary have no text.
    ///
    /// # Errors
    ///
    /// Fails if the tokenizer's decoder does.
    pub fn decode(&self, ids: &[u32]) -> Result<String, EngineError> {
        self.decode_with(ids, false)
    }

    /// Returns the text of `ids` without special tokens.
    ///
    /// # Errors
    ///
    /// Fails if the tokenizer's decoder does.
    pub fn decode_skip_special(&self, ids: &[u32]) -> Result<String, EngineError> {
        self.decode_with(ids, true)
    }

    fn decode_with(&self, ids: &[u32], skip_special: bool) -> Result<String, EngineError> {
        let decoded = guarded(|| self.inner.full.decode(ids, skip_special));
        decoded.map_err(|source| EngineError::Tokenizer {
            action: "decode ids",
            source,
        })
    }

    /// Returns a decoder for ids that arrive one by one.
    pub fn detokenizer(&self) -> Detokenizer {
        Detokenizer {
            tokenizer: self.clone(),
            ids: Vec::new(),
            context: 0,
            returned: 0,
        }
    }

    /// Returns the id of a token's exact spelling.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.full.token_to_id(token)
    }

    /// Returns what a token adds to the text, as bytes, which may be a part of a character; nothing where
    /// there is no such token.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        let table = self
            .inner
            .token_bytes
            .get_or_init(|| self.all_token_bytes());
        table.get(id as usize).map_or(&[], Vec::as_slice)
    }

    /// Returns the spelling of a token; `None` where there is no such token.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.full.id_to_token(id)
    }

    /// Returns the first id of `other`'s tokens that is another token here, or none.
    pub fn differing_token(&self, other: &Self) -> Option<u32> {
        let theirs = other.inner.full.get_vocab(true);
        let differs = |(token, id): (String, u32)| {
            (self.token(id).as_ref() != Some(&token) && other.token(id).as_ref() == Some(&token))
                .then_some(id)
        };
        theirs.into_iter().filter_map(differs).min()
    }

    /// Returns how many bytes the longest token adds to the text; 1 at least.
    pub fn longest_token(&self) -> usize {
        let longest = || self.all_bytes().iter().map(Vec::len).max();
        *(self.inner.longest_token).get_or_init(|| longest().unwrap_or(0).max(1))
    }

    /// Returns the tokens that were added to the vocabulary, as control tokens and marks are.
    pub(super) fn added_ids(&self) -> impl Iterator<Item = u32> {
        self.inner.added.iter().map(|token| token.id)
    }

    fn all_bytes(&self) -> &[Vec<u8>] {
        (self.inner.token_bytes).get_or_init(|| self.all_token_bytes())
    }

    /// Byte-level vocabularies spell each byte as a character; others spell blanks as `▁` and bytes
    /// without a character as `<0x0A>`.
    fn all_token_bytes(&self) -> Vec<Vec<u8>> {
        let decoder = self.inner.full.get_decoder();
        let is_byte_level = decoder
            .and_then(|decoder| serde_json::to_string(decoder).ok())
            .is_some_and(|decoder| decoder.contains("\"ByteLevel\""));
        let bytes: BTreeMap<char, u8> = (0..=u8::MAX)
            .map(|byte| (byte_to_char(byte), byte))
            .collect();
        let spell = |spelling: String| {
            if is_byte_level {
                return spelling
                    .chars()
                    .filter_map(|character| bytes.get(&character).copied())
                    .collect();
            }
            let byte = spelling
                .strip_prefix("<0x")
                .and_then(|rest| u8::from_str_radix(rest.strip_suffix('>')?, 16).ok());
            match byte {
                Some(byte) => vec![byte],
                None => spelling.replace('▁', " ").into_bytes(),
            }
        };
        // An id far from all others is a damaged file's; a model that has it has as many rows.
        let count = self
            .largest_id()
            .map_or(0, |largest| largest.saturating_add(1));
        let count = count.min(MAX_TOKENS);
        let mut words: Vec<Vec<u8>> = (0..count)
            .map(|id| self.inner.full.id_to_token(id).map_or_else(Vec::new, spell))
            .collect();
        for added in &self.inner.added {
            if let Some(word) = words.get_mut(added.id as usize) {
                *word = added.content.clone().into_bytes();
            }
        }
        words
    }

    /// Returns the number of tokens, added ones included. A model may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.inner.full.get_vocab_size(true)
    }

    /// Returns the largest id of a token; `None` if there is no token.
    pub fn largest_id(&self) -> Option<u32> {
        self.inner.full.get_vocab(true).into_values().max()
    }

    /// Returns the special tokens by their names in `tokenizer_config.json` (`eos_token`), as chat
    /// templates use them.
    pub fn special_tokens(&self) -> &BTreeMap<String, String> {
        &self.inner.special_tokens
    }

    /// Returns the token that ends a turn.
    pub fn eos_token(&self) -> Option<&str> {
        self.inner
            .special_tokens
            .get("eos_token")
            .map(String::as_str)
    }

    /// Returns the spellings of the special tokens, which steer the model.
    pub fn control_tokens(&self) -> Vec<String> {
        self.added_tokens(true)
    }

    /// Returns the spellings of the added tokens that are not special, such as `<think>`.
    pub fn markup_tokens(&self) -> Vec<String> {
        self.added_tokens(false)
    }

    fn added_tokens(&self, special: bool) -> Vec<String> {
        let added = self.inner.added.iter();
        added
            .filter(|token| token.special == special)
            .map(|token| token.content.clone())
            .collect()
    }

    /// Writes `tokenizer.json` and `tokenizer_config.json` into a model folder.
    ///
    /// # Errors
    ///
    /// Fails if a file cannot be written.
    pub fn save(&self, folder: &Path, chat_template: Option<&str>) -> Result<(), EngineError> {
        let text = self.inner.full.to_string(true);
        let text = text.map_err(|source| EngineError::Tokenizer {
            action: "serialise itself",
            source,
        })?;
        let mut config: serde_json::Map<String, Value> = [(
            "tokenizer_class".to_owned(),
            Value::from("PreTrainedTokenizerFast"),
        )]
        .into_iter()
        .collect();
        for (key, token) in &self.inner.special_tokens {
            config.insert(key.clone(), token.as_str().into());
        }
        if let Some(template) = chat_template {
            config.insert("chat_template".to_owned(), template.into());
        }
        let config = Value::Object(config);
        for (name, text) in [
            ("tokenizer.json", text),
            ("tokenizer_config.json", format!("{config:#}\n")),
        ] {
            let path = folder.join(name);
            fs::write(&path, text).map_err(|source| EngineError::Io { path, source })?;
        }
        Ok(())
    }
}

/// Runs a call of the library, which on some damaged files ends in a panic: a bad `precompiled_charsmap`,
/// a decoder that strips more than there is.
fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> tokenizers::Result<T> {
    std::panic::catch_unwind(AssertUnwindSafe(call))
        .unwrap_or_else(|_| Err("a part of the tokenizer's file contradicts itself".into()))
}

fn encode_with(tokenizer: &tokenizers::Tokenizer, text: &str) -> Result<Vec<u32>, EngineError> {
    match guarded(|| tokenizer.encode_fast(text, false)) {
        Ok(encoding) => Ok(encoding.get_ids().to_vec()),
        Err(source) => Err(EngineError::Tokenizer {
            action: "encode text",
            source,
        }),
    }
}

/// Turns ids that arrive one by one into text.
///
/// A character may be spread over several tokens; its text comes with the last of them. The pieces
/// together equal the text of all ids decoded at once.
///
/// ```
/// use wardian::engine::Tokenizer;
///
/// let mut detokenizer = Tokenizer::byte_level(&[])?.detokenizer();
/// assert_eq!(detokenizer.push(0xc3)?, "");
/// assert_eq!(detokenizer.push(0xa9)?, "é");
/// assert_eq!(detokenizer.finish()?, "");
/// # Ok::<(), wardian::engine::EngineError>(())
/// ```
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    /// The ids whose text is not settled, behind some settled ones for context: decoders may treat
    /// the first token of a text in another way.
    ids: Vec<u32>,
    /// How many of `ids` are context.
    context: usize,
    /// How many bytes of the text of `ids` have been returned.
    returned: usize,
}

impl Detokenizer {
    /// Takes the next id and returns the text that it completes, possibly none.
    ///
    /// # Errors
    ///
    /// Fails if the tokenizer's decoder does.
    pub fn push(&mut self, id: u32) -> Result<String, EngineError> {
        self.ids.push(id);
        let text = self.tokenizer.decode(&self.ids)?;
        // Trailing replacement characters may stand for the start of a character.
        let settled = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
        let piece = settled.get(self.returned..).unwrap_or_default().to_owned();
        self.returned = self.returned.max(settled.len());
        if settled.len() == text.len() {
            self.ids.drain(..self.context);
            self.context = self.ids.len();
            self.returned = self.tokenizer.decode(&self.ids)?.len();
        }
        Ok(piece)
    }

    /// Returns the text that is still held back.
    ///
    /// # Errors
    ///
    /// Fails if the tokenizer's decoder does.
    pub fn finish(self) -> Result<String, EngineError> {
        let text = self.tokenizer.decode(&self.ids)?;
        Ok(text.get(self.returned..).unwrap_or_default().to_owned())
    }
}

/// How text is cut into words before merges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PreTokenizer {
    /// GPT-2's pattern.
    Gpt2,
    /// GPT-2's pattern with every digit alone.
    SmolLm,
    /// Qwen2's and Qwen3's pattern: every digit alone, contractions in capitals as well. Text is brought
    /// into composed form first.
    Qwen2,
    /// Llama 3's pattern: digits in groups of three. A word that is a token needs no merges.
    Llama3,
    /// No cuts: there are no merges.
    Bytes,
}

/// The parts of a byte-level BPE tokenizer.
pub(super) struct BpeDescription {
    /// Spellings in the byte alphabet of GPT-2; the index is the id.
    pub(super) tokens: Vec<String>,
    /// Pairs `left right`, best first.
    pub(super) merges: Vec<String>,
    pub(super) special_ids: Vec<u32>,
    /// Added tokens that are not special.
    pub(super) added_ids: Vec<u32>,
    pub(super) pre_tokenizer: PreTokenizer,
}

impl BpeDescription {
    /// Returns the content of a `tokenizer.json`.
    fn to_json(&self) -> Value {
        // The two models' patterns differ in the digits that make a word. From their `tokenizer.json`.
        let split = |digits: &str| {
            let pattern = format!(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            );
            json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
                   "invert": false})
        };
        let byte_level = |use_regex: bool| {
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                   "use_regex": use_regex})
        };
        let pre_tokenizer = match self.pre_tokenizer {
            PreTokenizer::Gpt2 => byte_level(true),
            PreTokenizer::SmolLm => json!({"type": "Sequence", "pretokenizers": [
                {"type": "Digits", "individual_digits": true}, byte_level(true)]}),
            PreTokenizer::Qwen2 => json!({"type": "Sequence", "pretokenizers": [
                split(r"\p{N}"), byte_level(false)]}),
            PreTokenizer::Llama3 => json!({"type": "Sequence", "pretokenizers": [
                split(r"\p{N}{1,3}"), byte_level(false)]}),
            PreTokenizer::Bytes => byte_level(false),
        };
        let normalizer = match self.pre_tokenizer {
            PreTokenizer::Qwen2 => json!({"type": "NFC"}),
            _ => Value::Null,
        };
        let added = |ids: &[u32], special: bool| -> Vec<Value> {
            let known = ids
                .iter()
                .filter_map(|&id| Some((id, self.tokens.get(id as usize)?)));
            known
                .map(|(id, content)| {
                    json!({"id": id, "content": content, "single_word": false, "lstrip": false,
                           "rstrip": false, "normalized": false, "special": special})
                })
                .collect()
        };
        let mut added_tokens = added(&self.special_ids, true);
        added_tokens.extend(added(&self.added_ids, false));
        let vocab: serde_json::Map<String, Value> = self
            .tokens
            .iter()
            .cloned()
            .zip((0_u32..).map(Value::from))
            .collect();
        json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added_tokens,
            "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": null,
            "decoder": byte_level(true),
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null,
                "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
                "byte_fallback": false, "vocab": vocab, "merges": self.merges,
                "ignore_merges": self.pre_tokenizer == PreTokenizer::Llama3,
            }
        })
    }
}

/// The character that stands for a byte in byte-level vocabularies (GPT-2, `bytes_to_unicode`).
fn byte_to_char(byte: u8) -> char {
    let is_plain = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if is_plain(byte) {
        return char::from(byte);
    }
    let rank = (0..byte).filter(|&lower| !is_plain(lower)).count();
    u32::try_from(256 + rank)
        .ok()
        .and_then(char::from_u32)
        .expect("fewer than 256 ranks, all of them letters")
}

/// Reads a file that must not be larger than `limit`.
pub(super) fn read_bounded(path: &Path, limit: u64) -> Result<Vec<u8>, EngineError> {
    let io_error = |source| EngineError::Io {
        path: path.to_owned(),
        source,
    };
    let bytes = fs::metadata(path).map_err(io_error)?.len();
    if bytes > limit {
        return Err(EngineError::FileTooLarge {
            path: path.to_owned(),
            bytes,
            limit,
        });
    }
    fs::read(path).map_err(io_error)
}

/// Reads a JSON file of at most 256 MiB; `None` if it does not exist.
pub(super) fn read_json(path: &Path) -> Result<Option<Value>, EngineError> {
    if !path.exists() {
        return Ok(None);
    }
    let bytes = read_bounded(path, MAX_FILE_BYTES)?;
    match serde_json::from_slice(&bytes) {
        Ok(value) => Ok(Some(value)),
        Err(source) => Err(EngineError::Json {
            path: path.to_owned(),
            source,
        }),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn toy() -> Tokenizer {
        Tokenizer::byte_level(&["<|start|>", "<|end|>"]).unwrap()
    }

    #[test]
    fn ordinary_text_never_becomes_a_control_token() {
        let tokenizer = toy();
        assert_eq!(tokenizer.encode("a<|end|>").unwrap(), [97, 257]);
        let ids = tokenizer.encode_ordinary("a<|end|>").unwrap();
        assert!(ids.iter().all(|&id| id < 256), "{ids:?}");
        assert_eq!(tokenizer.decode(&ids).unwrap(), "a<|end|>");
    }

    #[test]
    fn only_literal_ranges_are_ordinary_in_a_chat() {
        let tokenizer = toy();
        let text = "<|start|>x<|end|>y<|end|>";
        let first_end = 10..11;
        let ids = tokenizer.encode_chat(text, &[first_end]).unwrap();
        assert_eq!(ids.first(), Some(&256));
        assert_eq!(ids.last(), Some(&257));
        assert_eq!(ids.iter().filter(|&&id| id >= 256).count(), 2);
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        assert_eq!(
            tokenizer.encode_chat(text, &[]).unwrap(),
            tokenizer.encode(text).unwrap()
        );
    }

    #[test]
    fn a_saved_tokenizer_reads_back() {
        let folder = tempfile::tempdir().unwrap();
        toy().save(folder.path(), Some("{{ messages }}")).unwrap();
        let read = Tokenizer::from_folder(folder.path()).unwrap();
        assert_eq!(
            read.encode("é<|end|>").unwrap(),
            toy().encode("é<|end|>").unwrap()
        );
        assert_eq!(read.eos_token(), Some("<|end|>"));
        assert_eq!(read.control_tokens(), toy().control_tokens());
    }

    #[test]
    fn digits_make_words_as_each_pattern_says() {
        let tokens = [
            "1", "2", "3", "4", "5", "12", "123", "45", "12345", "'", "S", "'S",
        ];
        let encode = |pre_tokenizer| {
            let description = BpeDescription {
                tokens: tokens.map(str::to_owned).to_vec(),
                merges: vec!["1 2".to_owned(), "4 5".to_owned(), "' S".to_owned()],
                special_ids: Vec::new(),
                added_ids: Vec::new(),
                pre_tokenizer,
            };
            let tokenizer = Tokenizer::from_bpe(&description, None, Path::new("test")).unwrap();
            let ids = tokenizer.encode("12345'S").unwrap();
            ids.into_iter()
                .map(|id| tokens[id as usize])
                .collect::<Vec<_>>()
        };
        assert_eq!(encode(PreTokenizer::Gpt2), ["12", "3", "45", "'", "S"]);
        assert_eq!(
            encode(PreTokenizer::SmolLm),
            ["1", "2", "3", "4", "5", "'", "S"]
        );
        assert_eq!(encode(PreTokenizer::Qwen2), ["1", "2", "3", "4", "5", "'S"]);
        // A whole word is taken though no merge makes it.
        assert_eq!(encode(PreTokenizer::Llama3), ["123", "45", "'S"]);
    }

    #[test]
    fn damaged_and_missing_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = Tokenizer::from_folder(folder.path()).unwrap_err();
        assert!(error.to_string().contains("tokenizer.json"), "{error}");
        fs::write(
            folder.path().join("tokenizer.json"),
            "{\"version\": \"1.0\"",
        )
        .unwrap();
        let error = Tokenizer::from_folder(folder.path()).unwrap_err();
        assert!(
            matches!(error, EngineError::TokenizerFile { .. }),
            "{error}"
        );
    }

    #[test]
    fn bytes_map_as_in_gpt2() {
        // tokenizers.pre_tokenizers.ByteLevel: " " -> "Ġ", "\n" -> "Ċ", "\x7f" -> "ġ", "\xad" -> "Ń".
        assert_eq!(byte_to_char(b' '), 'Ġ');
        assert_eq!(byte_to_char(b'\n'), 'Ċ');
        assert_eq!(byte_to_char(0x7f), 'ġ');
        assert_eq!(byte_to_char(0xad), 'Ń');
        assert_eq!(byte_to_char(b'a'), 'a');
    }

    proptest! {
        #[test]
        fn text_survives_encoding(text in "\\PC{0,40}") {
            let ids = toy().encode_ordinary(&text).unwrap();
            prop_assert_eq!(toy().decode(&ids).unwrap(), text);
        }

        /// Any bytes, valid UTF-8 or not: the streamed pieces equal the text decoded at once.
        #[test]
        fn streamed_text_equals_decoded_text(ids in prop::collection::vec(0_u32..259, 0..40)) {
            let tokenizer = toy();
            let mut detokenizer = tokenizer.detokenizer();
            let mut text = String::new();
            for &id in &ids {
                text += &detokenizer.push(id).unwrap();
            }
            text += &detokenizer.finish().unwrap();
            prop_assert_eq!(text, tokenizer.decode(&ids).unwrap());
        }

        /// A damaged `tokenizer.json` is refused, or it is one that encodes and decodes.
        #[test]
        fn damaged_tokenizers_are_survived(
            at in prop::sample::select(vec![
                "/model/type", "/model/vocab/a", "/model/vocab", "/model/merges", "/model/unk_token",
                "/model/continuing_subword_prefix", "/model/byte_fallback", "/added_tokens",
                "/added_tokens/0/id", "/added_tokens/0/content", "/added_tokens/0/lstrip",
                "/pre_tokenizer", "/pre_tokenizer/type", "/decoder", "/decoder/type", "/normalizer",
                "/post_processor", "/truncation", "/padding", "/version",
            ]),
            value in prop::sample::select(vec![
                "null", "0", "-1", "257", "4294967295", "\"\"", "\"a\"", "[]", "[\"a b\"]", "[\"a a\"]",
                "{}", "true", "\"WordLevel\"", "\"Unigram\"", "\"WordPiece\"", "\"Metaspace\"",
                r#"{"type": "NFC"}"#, r#"{"type": "Precompiled", "precompiled_charsmap": "AAAA"}"#,
                r#"{"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": false}"#,
                r#"{"type": "Replace", "pattern": {"String": ""}, "content": "aa"}"#,
                r#"{"type": "Strip", "strip_left": true, "strip_right": true, "content": "a", "start": 9, "stop": 9}"#,
                r#"{"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}"#,
                r#"{"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 9}"#,
            ]),
        ) {
            let text = toy().inner.full.to_string(false).unwrap();
            let mut file: Value = serde_json::from_str(&text).unwrap();
            if let Some(place) = file.pointer_mut(at) {
                *place = serde_json::from_str(value).unwrap();
            }
            let bytes = file.to_string().into_bytes();
            if let Ok(tokenizer) = Tokenizer::from_bytes(&bytes, None, Path::new("damaged")) {
                for ids in [tokenizer.encode("a<|end|> b"), tokenizer.encode_ordinary("a<|end|> b")] {
                    let _ = ids.and_then(|ids| tokenizer.decode(&ids));
                }
                tokenizer.largest_id();
            }
        }
    }
}
