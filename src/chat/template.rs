//! Chat templates: a conversation to the exact text that Hugging Face renders.
//!
//! The template is the `chat_template` of a `tokenizer_config.json`, run by minijinja with the
//! settings of `transformers` (`trim_blocks`, `lstrip_blocks`, Python's string methods, its own
//! `tojson`, `raise_exception`, `strftime_now`). Text is held to goldens made with transformers.
//!
//! **Control tokens in content.** Templates paste content as it is, so a tool result that contains
//! `<|im_end|>` would end the turn. A [`ChatTemplate`] that knows the tokenizer's control tokens
//! ([`ChatTemplate::with_control_tokens`]) reports where such spellings came from content, in
//! [`RenderedChat::literal`]; the tokenizer then reads them as ordinary text. The text itself does
//! not change.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind};
use serde_json::{Map, Value};

use super::json::tojson_filter;
use super::{ChatError, Message, Role, ToolCall, ToolSpec};

/// Longest accepted template source; the longest in use have about 20 KB.
const MAX_TEMPLATE_BYTES: usize = 1 << 20;

/// Most steps of one rendering, each an instruction or 64 bytes of text: some 256 MB of text and less
/// than a second. A conversation of 1 MB takes some 100,000.
const MAX_FUEL: u64 = 4_000_000;

/// Deepest nesting of blocks, calls of macros counting for five. Such frames are large, and threads
/// have stacks of 2 MiB.
const MAX_RECURSION: usize = 100;

const TEMPLATE_NAME: &str = "chat_template";

/// Text for the tokenizer, with the places that quote control tokens.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RenderedChat {
    /// The rendered text.
    pub text: String,
    /// Byte ranges of `text`, in order: a control token that overlaps one of them came from
    /// content and must be read as ordinary text.
    pub literal: Vec<Range<usize>>,
}

/// What a rendering asks for besides the messages.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RenderOptions {
    /// Whether to end with the header of an assistant turn. Default: false.
    pub add_generation_prompt: bool,
    /// Qwen3's switch; `None` leaves the variable undefined. Default: `None`.
    pub enable_thinking: Option<bool>,
    /// Further template variables. Default: none.
    pub extra: Map<String, Value>,
}

impl RenderOptions {
    /// Returns options for a prompt: the text ends where the model continues.
    pub fn prompt() -> Self {
        Self {
            add_generation_prompt: true,
            ..Self::default()
        }
    }
}

/// A compiled chat template; cheap to clone.
///
/// ```
/// use wardian::chat::{ChatTemplate, Message, RenderOptions};
///
/// let template = ChatTemplate::new(
///     "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}\
///      {% if add_generation_prompt %}<|assistant|>{% endif %}",
/// )?;
/// let chat = template.render(&[Message::user("hi")], &[], &RenderOptions::prompt())?;
/// assert_eq!(chat.text, "<|user|>hi\n<|assistant|>");
/// # Ok::<(), wardian::chat::ChatError>(())
/// ```
#[derive(Clone)]
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    source: Arc<str>,
    special_tokens: BTreeMap<String, String>,
    control_tokens: Vec<String>,
    markup_tokens: Vec<String>,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("bytes", &self.source.len())
            .field("special_tokens", &self.special_tokens)
            .field("control_tokens", &self.control_tokens)
            .finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// Today's date, for templates that print it, is read once, here: prompts do not change at
    /// midnight. See [`ChatTemplate::with_date`].
    ///
    /// # Errors
    ///
    /// [`ChatError::Syntax`] when the source is not valid Jinja, [`ChatError::TemplateTooLong`]
    /// above 1 MiB.
    pub fn new(source: &str) -> Result<Self, ChatError> {
        Self::with_date(source, jiff::ZonedDateTime::now())
    }

    /// Compiles a template whose `strftime_now` prints `date`.
    ///
    /// # Errors
    ///
    /// As [`ChatTemplate::new`].
    pub fn with_date(source: &str, date: jiff::ZonedDateTime) -> Result<Self, ChatError> {
        if source.len() > MAX_TEMPLATE_BYTES {
            return Err(ChatError::TemplateTooLong {
                bytes: source.len(),
                limit: MAX_TEMPLATE_BYTES,
            });
        }
        let syntax = |error| ChatError::Syntax {
            source: Arc::new(error),
        };
        let mut environment = Environment::new();
        environment.set_syntax(
            SyntaxConfig::builder()
                .trim_blocks(true)
                .lstrip_blocks(true)
                .build()
                .map_err(syntax)?,
        );
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        // Templates come with models, and a model may come from anywhere.
        environment.set_fuel(Some(MAX_FUEL));
        environment.set_recursion_limit(MAX_RECURSION);
        environment.add_filter("tojson", tojson_filter);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", move |format: String| {
            jiff::fmt::strtime::format(&format, &date).map_err(|error| {
                Error::new(ErrorKind::InvalidOperation, "invalid format of a date")
                    .with_source(error)
            })
        });
        environment
            .add_template_owned(TEMPLATE_NAME, replace_generation_tags(source))
            .map_err(syntax)?;
        Ok(Self {
            environment: Arc::new(environment),
            source: source.into(),
            special_tokens: BTreeMap::new(),
            control_tokens: Vec::new(),
            markup_tokens: Vec::new(),
        })
    }

    /// Sets the variables that hold special tokens: `bos_token`, `eos_token`, ….
    #[must_use]
    pub fn with_special_tokens(mut self, tokens: BTreeMap<String, String>) -> Self {
        self.special_tokens = tokens;
        self
    }

    /// Sets the spellings that must not become control tokens when they occur in content.
    ///
    /// `control` are the tokenizer's special tokens (`<|im_end|>`): they are ordinary text in
    /// user, tool and assistant messages. `markup` are its other added tokens (`<think>`,
    /// `<tool_call>`): they are ordinary text in user and tool messages, but an assistant message
    /// may hold them. System messages are the operator's and are taken as they are.
    #[must_use]
    pub fn with_control_tokens(mut self, control: Vec<String>, markup: Vec<String>) -> Self {
        let usable = |tokens: Vec<String>| tokens.into_iter().filter(|t| !t.is_empty()).collect();
        self.control_tokens = usable(control);
        self.markup_tokens = usable(markup);
        self
    }

    /// Returns the template's source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a conversation.
    ///
    /// # Errors
    ///
    /// [`ChatError::Refused`] when the template calls `raise_exception`, [`ChatError::OutOfFuel`]
    /// when it does not end, [`ChatError::Render`] when it fails otherwise.
    pub fn render(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
        options: &RenderOptions,
    ) -> Result<RenderedChat, ChatError> {
        let messages: Vec<Value> = messages.iter().map(to_json).collect();
        let tools: Vec<Value> = tools.iter().map(to_json).collect();
        self.render_json(&messages, &tools, options)
    }

    /// Renders a conversation given as JSON: what [`ChatTemplate::render`] does, for messages and
    /// tools that go beyond [`Message`] and [`ToolSpec`] (null content, content parts).
    ///
    /// # Errors
    ///
    /// As [`ChatTemplate::render`].
    pub fn render_json(
        &self,
        messages: &[Value],
        tools: &[Value],
        options: &RenderOptions,
    ) -> Result<RenderedChat, ChatError> {
        let mut variables = Map::new();
        for (name, token) in &self.special_tokens {
            variables.insert(name.clone(), Value::from(token.as_str()));
        }
        // transformers passes `None` for what was not given, so `tools is none` must hold.
        let tools = match tools {
            [] => Value::Null,
            tools => Value::Array(tools.to_vec()),
        };
        variables.insert("tools".to_owned(), tools);
        variables.insert("documents".to_owned(), Value::Null);
        variables.insert(
            "add_generation_prompt".to_owned(),
            Value::Bool(options.add_generation_prompt),
        );
        if let Some(enable_thinking) = options.enable_thinking {
            variables.insert("enable_thinking".to_owned(), Value::Bool(enable_thinking));
        }
        variables.extend(options.extra.clone());
        variables.insert("messages".to_owned(), Value::Array(messages.to_vec()));
        let guard = match self.control_tokens.len() + self.markup_tokens.len() {
            0 => None,
            _ => Some(self.unused_character(&variables)?),
        };
        if let Some(guard) = guard {
            let guarded = messages
                .iter()
                .map(|m| self.guard_message(m, guard))
                .collect();
            variables.insert("messages".to_owned(), Value::Array(guarded));
        }
        let text = self
            .environment
            .get_template(TEMPLATE_NAME)
            .and_then(|template| template.render(Serde(&variables)))
            .map_err(render_error)?;
        Ok(match guard {
            Some(guard) => remove_guards(&text, guard),
            None => RenderedChat {
                text,
                literal: Vec::new(),
            },
        })
    }

    /// Returns a character that the rendered text cannot hold yet. It marks, while the template
    /// runs, that the character before it begins a quoted control token.
    fn unused_character(&self, variables: &Map<String, Value>) -> Result<char, ChatError> {
        let text = Value::Object(variables.clone()).to_string();
        // Noncharacters, which text seldom holds, then those for private use.
        ('\u{fdd0}'..='\u{fdef}')
            .chain('\u{f0000}'..='\u{ffffd}')
            .find(|&candidate| !text.contains(candidate) && !self.source.contains(candidate))
            .ok_or(ChatError::NoUnusedCharacter)
    }

    /// Returns the text that follows an assistant turn which ended in `end_of_turn`, when
    /// `messages` (tool results) come next and the model speaks again.
    ///
    /// The sampled ids of the turn stay as they are, end-of-turn token included; the ids of this
    /// suffix are appended to them. The suffix is the difference of two renderings of a dummy
    /// conversation, and it exists only where the template is append-only: the rendering up to the
    /// assistant turn must be a prefix of the rendering with the messages. Qwen3's template is
    /// append-only for tool results and not for user turns, which drop earlier reasoning.
    ///
    /// # Errors
    ///
    /// [`ChatError::NotAppendOnly`] and [`ChatError::NoEndOfTurn`] when the template has no such
    /// suffix; otherwise as [`ChatTemplate::render`].
    pub fn tool_suffix(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
        end_of_turn: &str,
        options: &RenderOptions,
    ) -> Result<RenderedChat, ChatError> {
        if messages.is_empty() {
            return Err(ChatError::NothingToAppend);
        }
        // Qwen3 keeps a turn's reasoning within a tool episode but adds an empty block to a last
        // turn without reasoning, so the dummy turn reasons. Templates that know no reasoning
        // ignore it; one that rejects it gets the second try.
        let mut outcome = Err(ChatError::NothingToAppend);
        for reasoning in [Some("dummy"), None] {
            outcome = self.suffix_after(reasoning, messages, tools, end_of_turn, options);
            if outcome.is_ok() {
                break;
            }
        }
        outcome
    }

    fn suffix_after(
        &self,
        reasoning: Option<&str>,
        messages: &[Message],
        tools: &[ToolSpec],
        end_of_turn: &str,
        options: &RenderOptions,
    ) -> Result<RenderedChat, ChatError> {
        let name = tools.first().map_or("dummy", |tool| tool.name.as_str());
        let turn = Message {
            reasoning_content: reasoning.map(str::to_owned),
            tool_calls: match messages.first().map(|message| message.role) {
                Some(Role::Tool) => vec![ToolCall::new(name, Value::Object(Map::new()))],
                _ => Vec::new(),
            },
            ..Message::assistant("dummy")
        };
        let mut conversation = vec![Message::user("dummy"), turn];
        let before = RenderOptions {
            add_generation_prompt: false,
            ..options.clone()
        };
        let before = self.render(&conversation, tools, &before)?.text;
        conversation.extend_from_slice(messages);
        let after = RenderOptions {
            add_generation_prompt: true,
            ..options.clone()
        };
        let after = self.render(&conversation, tools, &after)?;
        if !after.text.starts_with(&before) {
            return Err(ChatError::NotAppendOnly {
                added: messages.len(),
            });
        }
        let no_end = || ChatError::NoEndOfTurn {
            token: end_of_turn.to_owned(),
        };
        if end_of_turn.is_empty() {
            return Err(no_end());
        }
        let start = before.rfind(end_of_turn).ok_or_else(no_end)? + end_of_turn.len();
        // Anything but blanks between the token and the next turn belongs to the dummy turn.
        if !before[start..].trim().is_empty() {
            return Err(no_end());
        }
        Ok(RenderedChat {
            text: after.text[start..].to_owned(),
            literal: after
                .literal
                .iter()
                .filter(|range| range.start >= start)
                .map(|range| range.start - start..range.end - start)
                .collect(),
        })
    }

    /// Marks the control tokens that a message's own words spell.
    fn guard_message(&self, message: &Value, guard: char) -> Value {
        let mut message = message.clone();
        let assistant = match message.get("role").and_then(Value::as_str) {
            Some("system" | "developer") => return message,
            role => role == Some("assistant"),
        };
        let markup: &[String] = if assistant { &[] } else { &self.markup_tokens };
        let begins_token = |rest: &str| {
            let mut tokens = self.control_tokens.iter().chain(markup);
            tokens.any(|token| rest.starts_with(token.as_str()))
        };
        if let Value::Object(fields) = &mut message {
            for (key, value) in fields {
                if key != "role" {
                    guard_value(value, guard, &begins_token);
                }
            }
        }
        message
    }
}

/// Puts a guard into every string of `value`, after each character that begins a token.
fn guard_value(value: &mut Value, guard: char, begins_token: &dyn Fn(&str) -> bool) {
    match value {
        Value::String(text) => {
            let mut guarded = String::with_capacity(text.len());
            for (index, character) in text.char_indices() {
                guarded.push(character);
                if begins_token(&text[index..]) {
                    guarded.push(guard);
                }
            }
            *text = guarded;
        }
        Value::Array(items) => {
            for item in items {
                guard_value(item, guard, begins_token);
            }
        }
        Value::Object(fields) => {
            for (_, item) in fields {
                guard_value(item, guard, begins_token);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Takes the guards out again and notes where they stood.
fn remove_guards(text: &str, guard: char) -> RenderedChat {
    let mut chat = RenderedChat {
        text: String::with_capacity(text.len()),
        literal: Vec::new(),
    };
    let mut previous = 0;
    for character in text.chars() {
        if character != guard {
            previous = chat.text.len();
            chat.text.push(character);
        } else if previous < chat.text.len() {
            chat.literal.push(previous..chat.text.len());
        }
    }
    chat
}

fn to_json<T: serde::Serialize>(value: &T) -> Value {
    serde_json::to_value(value).expect("messages and tools have string keys only")
}

/// The error that `raise_exception` carries out of the template.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct TemplateException(String);

fn raise_exception(message: String) -> Result<minijinja::Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "raise_exception")
        .with_source(TemplateException(message)))
}

fn render_error(error: Error) -> ChatError {
    if error.kind() == ErrorKind::OutOfFuel {
        return ChatError::OutOfFuel { limit: MAX_FUEL };
    }
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(current) = cause {
        if let Some(TemplateException(message)) = current.downcast_ref() {
            return ChatError::Refused {
                message: message.clone(),
            };
        }
        cause = current.source();
    }
    ChatError::Render {
        source: Arc::new(error),
    }
}

/// Replaces transformers' `{% generation %}` and `{% endgeneration %}`, which mark the model's
/// words for loss masks and print nothing, by a condition that always holds.
fn replace_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        // Behind the opening, of which the sign may not serve twice.
        let Some(length) = tag[2..].find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(length + 4);
        let inner = &tag[2..length + 2];
        let name = inner.trim_matches(['-', '+']).trim();
        let replacement = match name {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        match replacement {
            Some(replacement) => {
                out.push_str("{%");
                out.push_str(&inner.replacen(name, replacement, 1));
                out.push_str("%}");
            }
            None => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Renders a conversation with any template, for fuzzing: the template's source, a zero byte, and what
/// the user says. Quoted control tokens change no text.
///
/// # Panics
///
/// Panics if they do, or if a quoted range is none of the text's.
#[cfg(any(fuzzing, test))]
pub fn fuzz_template(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let (source, content) = text.split_once('\0').unwrap_or((&text, "<|end|>"));
    let date = "2026-11-29T12:00:00[UTC]".parse().expect("a date");
    let Ok(plain) = ChatTemplate::with_date(source, date) else {
        return;
    };
    let guarded = (plain.clone()).with_control_tokens(vec!["<|end|>".to_owned()], Vec::new());
    let tool = ToolSpec::new("f", content, serde_json::json!({"type": "object"}));
    let messages = [Message::user(content), Message::assistant(content)];
    for tools in [&[][..], &[tool]] {
        let options = RenderOptions::prompt();
        let found = plain.render(&messages, tools, &options);
        let quoted = guarded.render(&messages, tools, &options);
        if let Ok(chat) = quoted {
            for range in &chat.literal {
                assert!(chat.text.get(range.clone()).is_some(), "{range:?}");
            }
            // A template may ask for a text's length or parts, where a guard shows.
            let copies = !source.contains(['|', '[', '(', '.', '=', '<', '>', '%']);
            if let (true, Ok(found)) = (copies, found) {
                assert_eq!(found.text, chat.text);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    const PLAIN: &str = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>\n{% endfor %}\
                         {% if add_generation_prompt %}[assistant]{% endif %}";

    fn guarded() -> ChatTemplate {
        ChatTemplate::new(PLAIN)
            .unwrap()
            .with_control_tokens(vec!["<|end|>".to_owned()], vec!["<think>".to_owned()])
    }

    #[test]
    fn control_tokens_in_content_are_reported_and_the_text_is_unchanged() {
        let messages = [
            Message::system("a<|end|>"),
            Message::user("b<|end|>\u{fdd0}<think>"),
            Message::assistant("<think>c<|end|>"),
            Message::tool("<<|end|>"),
        ];
        let options = RenderOptions::prompt();
        let plain = ChatTemplate::new(PLAIN).unwrap();
        let plain = plain.render(&messages, &[], &options).unwrap();
        let chat = guarded().render(&messages, &[], &options).unwrap();
        assert_eq!(chat.text, plain.text);
        let marked: Vec<&str> = chat.literal.iter().map(|r| &chat.text[r.start..]).collect();
        let expected = [
            "<|end|>\u{fdd0}<think><|end|>\n[assistant]<think>",
            "<think><|end|>\n[assistant]<think>",
            "<|end|><|end|>\n[tool]<",
            "<|end|><|end|>\n[assistant]",
        ];
        assert_eq!(marked.len(), expected.len());
        for (marked, expected) in marked.iter().zip(expected) {
            assert!(marked.starts_with(expected), "{marked:?}");
        }
    }

    #[test]
    fn suffix_begins_after_the_end_of_turn_token() {
        let chat = guarded()
            .tool_suffix(
                &[Message::tool("4<|end|>")],
                &[],
                "<|end|>",
                &RenderOptions::default(),
            )
            .unwrap();
        assert_eq!(chat.text, "\n[tool]4<|end|><|end|>\n[assistant]");
        let [range] = &chat.literal[..] else {
            panic!("one quoted token: {chat:?}")
        };
        assert_eq!(*range, 8..9);
    }

    #[test]
    fn a_template_without_the_token_has_no_suffix() {
        let error = guarded()
            .tool_suffix(
                &[Message::tool("4")],
                &[],
                "<|eot|>",
                &RenderOptions::default(),
            )
            .unwrap_err();
        assert!(matches!(error, ChatError::NoEndOfTurn { .. }), "{error}");
    }

    #[test]
    fn raised_exceptions_carry_the_authors_words() {
        let template = ChatTemplate::new("{{ raise_exception('roles must alternate') }}").unwrap();
        let error = template
            .render(&[], &[], &RenderOptions::default())
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "chat template refused the conversation: roles must alternate"
        );
    }

    #[test]
    fn dates_come_from_the_given_clock() {
        let date: jiff::ZonedDateTime = "2026-11-29T12:00:00[UTC]".parse().unwrap();
        let template = ChatTemplate::with_date("{{ strftime_now('%d %b %Y') }}", date).unwrap();
        let chat = template
            .render(&[], &[], &RenderOptions::default())
            .unwrap();
        assert_eq!(chat.text, "29 Nov 2026");
    }

    #[test]
    fn generation_tags_keep_their_whitespace_control() {
        assert_eq!(
            replace_generation_tags("a{%- generation %}b{% endgeneration -%}c{% if x %}"),
            "a{%- if true %}b{% endif -%}c{% if x %}"
        );
        assert_eq!(replace_generation_tags("{% generation"), "{% generation");
        assert_eq!(replace_generation_tags("{%}}%}"), "{%}}%}");
    }

    #[test]
    fn special_tokens_and_extra_variables_reach_the_template() {
        let template = ChatTemplate::new("{{ bos_token }}{{ flavour }}{{ tools is none }}")
            .unwrap()
            .with_special_tokens([("bos_token".to_owned(), "<s>".to_owned())].into());
        let mut options = RenderOptions::default();
        options.extra.insert("flavour".to_owned(), "mint".into());
        let chat = template.render(&[], &[], &options).unwrap();
        assert_eq!(chat.text, "<s>mintTrue");
    }

    /// What would take for ever, all memory or all of the stack is stopped.
    #[rstest]
    #[case::nested_loops(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )]
    #[case::doubling(
        "{% set n = namespace(t='xxxxxxxx') %}\
                      {% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}"
    )]
    #[case::long_output("{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}")]
    #[case::macro_without_end("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")]
    #[case::two_macros(
        "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}\
                        {{ f() }}"
    )]
    #[case::recursive_loop("{% for m in [[0]] recursive %}{{ loop([[0]]) }}{% endfor %}")]
    #[case::itself("{% include 'chat_template' %}")]
    #[case::indented_json("{{ [1, 2]|tojson(indent=99999999999) }}")]
    #[case::separated_json("{{ range(9999)|list|tojson(separators=['x' * 99999, ':']) }}")]
    fn templates_without_end_are_stopped(#[case] source: &str) {
        let start = std::time::Instant::now();
        let template = ChatTemplate::new(source).unwrap();
        let error = template
            .render(&[Message::user("hi")], &[], &RenderOptions::default())
            .unwrap_err();
        assert!(
            matches!(
                error,
                ChatError::OutOfFuel { .. } | ChatError::Render { .. }
            ),
            "{error}"
        );
        assert!(start.elapsed().as_secs() < 60);
    }

    #[test]
    fn deep_sources_are_refused() {
        for source in ["(".repeat(100_000), "{% if x %}".repeat(10_000)] {
            let source = format!("{{{{ {source} }}}}");
            ChatTemplate::new(&source).unwrap_err();
        }
        ChatTemplate::new(&"{% if x %}".repeat(10_000)).unwrap_err();
    }

    proptest! {
        #[test]
        fn any_template_is_survived(
            parts in prop::collection::vec(
                prop::sample::select(vec![
                    "{{", "}}", "{%", "%}", " for m in messages ", " endfor ", " if ", " endif ",
                    "m.content", "messages", "tools", "|tojson", "[0]", "loop", "<|end|>", "\0", " x ",
                    " set ", "=", "~", "'", "namespace()", " macro f() ", " endmacro ", "f()", "é",
                ]),
                0..24,
            ),
        ) {
            fuzz_template(parts.concat().as_bytes());
        }
    }
}
