//! Words: messages, chat templates and tool calls; no tensors, no sandboxes.
//!
//! - [`Message`], [`ToolCall`] and [`ToolSpec`] have the shapes of the chat completions API.
//! - [`ChatTemplate`] turns a conversation into the exact text that Hugging Face's
//!   `apply_chat_template` would produce, plus the places in it that quote outside text
//!   ([`RenderedChat::literal`]): there, the spelling of a control token is only text.
//! - [`parse_turn_as`] reads what the model wrote back into reasoning, content and tool calls, in the
//!   [`ToolCallFormat`] of its chat template.
//!
//! - [`AnswerGrammar`] says the same beforehand: what an answer that is guided must look like.
//!
//! In a multi-turn episode the sampled ids are kept and only [`ChatTemplate::tool_suffix`] is
//! tokenised: decoding and encoding again may give other ids than the ones that were sampled.

mod grammar;
mod json;
mod message;
mod schema;
mod template;
mod tool_parser;

use std::sync::Arc;

pub use grammar::{AnswerGrammar, AnswerReasoning, AnswerShape};
pub use json::{to_ascii_python_json, to_python_json};
pub use message::{Message, Role, ToolCall, ToolSpec};
pub use schema::SchemaError;
#[cfg(any(fuzzing, test))]
pub use template::fuzz_template;
pub use template::{ChatTemplate, RenderOptions, RenderedChat};
pub(crate) use tool_parser::json_type;
pub use tool_parser::{
    ParsedTurn, ToolCallError, ToolCallFormat, UnknownToolCallFormat, parse_calls, parse_turn,
    parse_turn_as,
};

/// What opens reasoning.
pub(crate) const THINK: &str = "<think>";
/// What ends it.
pub(crate) const THINK_END: &str = "</think>";

/// A chat template that could not be read or rendered.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The template's source is longer than the limit.
    #[error("chat template too long: {bytes} > {limit} bytes")]
    TemplateTooLong {
        /// Length of the source.
        bytes: usize,
        /// The longest accepted source.
        limit: usize,
    },
    /// The template is not valid Jinja.
    #[error("chat template is not valid Jinja; check `chat_template` in `tokenizer_config.json`")]
    Syntax {
        /// What the parser said, with the line.
        #[source]
        source: Arc<minijinja::Error>,
    },
    /// The template failed on this conversation.
    #[error("chat template cannot render this conversation")]
    Render {
        /// What the template engine said, with the line.
        #[source]
        source: Arc<minijinja::Error>,
    },
    /// The template loops for ever, or makes texts without end.
    #[error(
        "chat template was stopped: it took more than {limit} steps, one for an instruction or for 64 \
         bytes of text"
    )]
    OutOfFuel {
        /// The most steps of a rendering.
        limit: u64,
    },
    /// The template refused the conversation through `raise_exception`.
    #[error("chat template refused the conversation: {message}")]
    Refused {
        /// The template author's words.
        message: String,
    },
    /// The template rewrites earlier turns when messages are added, so no suffix exists.
    #[error(
        "chat template is not append-only: adding {added} message(s) changes the text of the \
         assistant turn before them; use an append-only (training) template"
    )]
    NotAppendOnly {
        /// How many messages were added.
        added: usize,
    },
    /// The end-of-turn token does not close the assistant turn.
    #[error("`{token}` does not end the assistant turn in this chat template")]
    NoEndOfTurn {
        /// The token that was looked for.
        token: String,
    },
    /// The messages use every character that could mark quoted control tokens.
    #[error("the conversation holds all private-use characters of plane 15")]
    NoUnusedCharacter,
    /// A suffix was asked for without a message to append.
    #[error("a suffix needs at least one message")]
    NothingToAppend,
}
