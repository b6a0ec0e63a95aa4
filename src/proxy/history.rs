//! Which call a conversation goes on from.
//!
//! An agent sends its whole history as text with each call, and rendering that text again may give
//! other ids than those that were sampled. So each call is known by a hash of its conversation and its
//! answer. A history that begins like that of an earlier call, the answer included, goes on from the
//! ids of that call; only what comes after the answer is tokenised.
//!
//! Two messages are the same if they say the same: the names of calls, `null` or an empty content,
//! content in parts or as one string, the spacing and order of a call's arguments, blanks around an
//! answer and keys that a client adds do not count. Reasoning may be left out of a history, but not
//! changed. An answer that was cut off may be gone on with in the history, as agents do that close the
//! block they wait for.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::record::{Call, Ending};

/// Stands for a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key([u8; 32]);

impl Key {
    /// Returns the key of a conversation without messages: `setting` is all else that a prompt is
    /// rendered from.
    fn of_setting(setting: &Value) -> Self {
        Self(*blake3::hash(setting.to_string().as_bytes()).as_bytes())
    }

    fn after(self, message: &Value) -> Self {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(meaning(message).to_string().as_bytes());
        Self(*hasher.finalize().as_bytes())
    }
}

/// Most answers to one conversation that are tried for a history that goes on with one.
const MAX_TRIED: usize = 16;

/// A call that a conversation goes on from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Continued {
    /// The call's place in its graph.
    pub(super) call: usize,
    /// How many of the messages it covers, its answer included.
    pub(super) messages: usize,
    /// What the history adds to the answer.
    pub(super) added: String,
}

/// The conversations of one attempt of a session.
#[derive(Debug, Default)]
pub(super) struct History {
    known: HashMap<Key, usize>,
    /// Calls whose answers were cut off, by the conversation before the answer.
    cut_off: HashMap<Key, Vec<usize>>,
}

impl History {
    /// Notes the conversation of the call that is at `place` of its graph.
    pub(super) fn insert(&mut self, setting: &Value, call: &Call, place: usize) {
        let mut key = Key::of_setting(setting);
        for message in &call.messages {
            key = key.after(message);
        }
        let mut answer = (*call.answer).clone();
        if !call.unsaid.is_empty() {
            answer["content"] = Value::from(text_of_ids(call));
        }
        self.known.insert(key.after(&answer), place);
        if matches!(call.ending, Ending::Length | Ending::StopText(_)) {
            self.cut_off.entry(key).or_default().push(place);
        }
    }

    /// Returns the call that covers the most of `messages`, if one covers any; the latest one if
    /// several do.
    pub(super) fn find<'c>(
        &self,
        setting: &Value,
        messages: &[Value],
        call: impl Fn(usize) -> Option<&'c Call>,
    ) -> Option<Continued> {
        let mut key = Key::of_setting(setting);
        let mut found = None;
        for (index, message) in messages.iter().enumerate() {
            let before = key;
            key = key.after(message);
            if !is_assistant(message) {
                continue;
            }
            let exact = self.known.get(&key).map(|place| (*place, String::new()));
            let gone_on = || {
                let tried = self.cut_off.get(&before)?.iter().rev().take(MAX_TRIED);
                let mut added =
                    tried.filter_map(|&place| Some((place, added(call(place)?, message)?)));
                added.next()
            };
            if let Some((place, added)) = exact.or_else(gone_on)
                && call(place).is_some_and(|call| reasoning_agrees(call, messages))
            {
                found = Some(Continued {
                    call: place,
                    messages: index + 1,
                    added,
                });
            }
        }
        found
    }
}

/// Returns the text of a call's ids. Those of an answer that a stop string ended have the string, too:
/// a history without it is another one than that of the ids.
fn text_of_ids(call: &Call) -> String {
    let content = call.answer["content"].as_str().unwrap_or_default();
    format!("{content}{}", call.unsaid)
}

/// Returns what `message` adds to the answer of `call`, if it begins like it.
fn added(call: &Call, message: &Value) -> Option<String> {
    let has_calls = |message: &Value| {
        let calls = message.get("tool_calls").and_then(Value::as_array);
        calls.is_some_and(|calls| !calls.is_empty())
    };
    let content = match message.get("content") {
        Some(Value::Array(parts)) => joined(parts),
        content => content.cloned().unwrap_or_default(),
    };
    let whole = text_of_ids(call);
    // An answer without content was cut off in its reasoning.
    if whole.is_empty() || has_calls(&call.answer) || has_calls(message) {
        return None;
    }
    content.as_str()?.strip_prefix(&whole).map(str::to_owned)
}

fn is_assistant(message: &Value) -> bool {
    message.get("role").and_then(Value::as_str) == Some("assistant")
}

/// Returns whether `messages`, which go on from `call`, have the reasoning that its own had, or none.
fn reasoning_agrees(call: &Call, messages: &[Value]) -> bool {
    let own = call.messages.iter().chain([&call.answer]);
    own.zip(messages).all(|(own, sent)| {
        let sent = reasoning(sent);
        sent.is_empty() || sent == reasoning(own)
    })
}

fn reasoning(message: &Value) -> &str {
    let text = |key| message.get(key).and_then(Value::as_str);
    let reasoning = text("reasoning_content").or_else(|| text("reasoning"));
    reasoning.unwrap_or_default().trim()
}

/// Returns what a message says, without how it is written.
fn meaning(message: &Value) -> Value {
    let field = |name: &str| message.get(name).cloned().unwrap_or_default();
    let mut content = match message.get("content") {
        Some(Value::Array(parts)) => joined(parts),
        Some(Value::Null) | None => Value::from(""),
        Some(content) => content.clone(),
    };
    let role = match message.get("role").and_then(Value::as_str) {
        Some("developer") => Value::from("system"),
        _ => field("role"),
    };
    if !is_assistant(message) {
        return json!([role, content, field("name")]);
    }
    if let Some(text) = content.as_str() {
        content = Value::from(text.trim());
    }
    let calls = message.get("tool_calls").and_then(Value::as_array);
    let calls: Vec<Value> = calls.into_iter().flatten().map(call_meaning).collect();
    json!([role, content, calls])
}

/// Returns the text of a content in parts; the parts themselves where one is no text.
fn joined(parts: &[Value]) -> Value {
    let text = |part: &Value| match part.get("type").and_then(Value::as_str) {
        Some("text") => part.get("text").and_then(Value::as_str).map(str::to_owned),
        _ => None,
    };
    let texts: Option<String> = parts.iter().map(text).collect();
    texts.map_or_else(|| Value::from(parts), Value::from)
}

fn call_meaning(call: &Value) -> Value {
    let function = call.get("function").unwrap_or(call);
    let arguments = function.get("arguments").cloned().unwrap_or_default();
    let arguments = match &arguments {
        Value::String(text) => serde_json::from_str(text).unwrap_or(arguments),
        _ => arguments,
    };
    json!([function.get("name"), sorted(arguments)])
}

/// Returns a value with the keys of its objects in order.
fn sorted(value: Value) -> Value {
    match value {
        Value::Array(items) => items.into_iter().map(sorted).collect(),
        Value::Object(fields) => {
            let mut fields: Vec<(String, Value)> = fields
                .into_iter()
                .map(|(key, value)| (key, sorted(value)))
                .collect();
            fields.sort_by(|left, right| left.0.cmp(&right.0));
            fields.into_iter().collect()
        }
        value => value,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::proxy::record::test_call;

    fn user(text: &str) -> Value {
        json!({"role": "user", "content": text})
    }

    fn said(text: &str) -> Value {
        json!({"role": "assistant", "content": text})
    }

    fn call(messages: &[Value], answer: Value) -> Call {
        Call {
            messages: messages.iter().cloned().map(Arc::new).collect(),
            answer: Arc::new(answer),
            ..test_call()
        }
    }

    struct Known(History, Vec<Call>);

    impl Known {
        fn new(calls: Vec<Call>) -> Self {
            let mut history = History::default();
            for (place, call) in calls.iter().enumerate() {
                history.insert(&Value::Null, call, place);
            }
            Self(history, calls)
        }

        fn find(&self, messages: &[Value]) -> Option<(usize, usize)> {
            let found = (self.0).find(&Value::Null, messages, |place| self.1.get(place))?;
            Some((found.call, found.messages))
        }
    }

    #[test]
    fn the_longest_conversation_is_gone_on_from() {
        let first = [user("a")];
        let second = [user("a"), said("b"), user("c")];
        let known = Known::new(vec![call(&first, said("b")), call(&second, said("d"))]);
        let all = [&second[..], &[said("d"), user("e")]].concat();
        assert_eq!(known.find(&all), Some((1, 4)));
        assert_eq!(known.find(&all[..3]), Some((0, 2)));
        assert_eq!(known.find(&all[..1]), None);
        let rewritten = [user("a"), said("b, roughly"), user("c")];
        assert_eq!(known.find(&rewritten), None);
        let other_task = [user("z"), said("b"), user("c")];
        assert_eq!(known.find(&other_task), None);
        let found = known
            .0
            .find(&json!("tools"), &all, |place| known.1.get(place));
        assert_eq!(found, None, "other tools render another prompt");
    }

    #[test]
    fn how_a_message_is_written_does_not_count() {
        let arguments = r#"{"a": 1, "b": [2]}"#;
        let answer = json!({"role": "assistant", "content": null, "refusal": null, "tool_calls": [
            {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": arguments}},
        ]});
        let known = Known::new(vec![call(&[user("x")], answer)]);
        let parts = json!({"role": "user", "content": [{"type": "text", "text": "x"}]});
        let echoed = json!({"role": "assistant", "content": "", "tool_calls": [
            {"id": "other", "function": {"name": "f", "arguments": "{\"b\":[2],\"a\":1}"}},
        ]});
        assert_eq!(known.find(&[parts.clone(), echoed]), Some((0, 2)));
        let other = json!({"role": "assistant", "content": "", "tool_calls": [
            {"id": "other", "function": {"name": "f", "arguments": "{\"b\":[2],\"a\":2}"}},
        ]});
        assert_eq!(known.find(&[parts, other]), None);
    }

    #[test]
    fn reasoning_may_be_left_out_but_not_changed() {
        let answer = json!({"role": "assistant", "content": "b", "reasoning_content": "hm"});
        let known = Known::new(vec![call(&[user("a")], answer.clone())]);
        assert_eq!(known.find(&[user("a"), answer]), Some((0, 2)));
        assert_eq!(known.find(&[user("a"), said("b")]), Some((0, 2)));
        let changed = json!({"role": "assistant", "content": "b", "reasoning": "hm, no"});
        assert_eq!(known.find(&[user("a"), changed]), None);
    }

    #[test]
    fn a_stop_string_may_be_put_back_on() {
        let mut stopped = call(&[user("a")], said("x = 1\n"));
        stopped.unsaid = "</code>\n".to_owned();
        let known = Known::new(vec![stopped]);
        assert_eq!(
            known.find(&[user("a"), said("x = 1\n</code>")]),
            Some((0, 2))
        );
        assert_eq!(known.find(&[user("a"), said("x = 1\n")]), None);
        assert_eq!(known.find(&[user("a"), said("x = 1</code>")]), None);
    }

    #[test]
    fn an_answer_that_was_cut_off_may_be_gone_on_with() {
        let ended = |ending: Ending| {
            let mut call = call(&[user("a")], said("x = 1"));
            call.ending = ending;
            Known::new(vec![call])
        };
        let history = [user("a"), said("x = 1\n</code>"), user("b")];
        let find = |known: &Known| {
            let found = (known.0).find(&Value::Null, &history, |place| known.1.get(place));
            found.map(|found| (found.messages, found.added))
        };
        assert_eq!(
            find(&ended(Ending::Length)),
            Some((2, "\n</code>".to_owned()))
        );
        assert_eq!(find(&ended(Ending::Stop)), None, "the model ended its turn");
        let mut in_reasoning = call(&[user("a")], said(""));
        in_reasoning.ending = Ending::Length;
        assert_eq!(find(&Known::new(vec![in_reasoning])), None);
    }

    #[test]
    fn the_latest_of_equal_answers_is_gone_on_from() {
        let twice = || call(&[user("a")], said("b"));
        let known = Known::new(vec![twice(), twice()]);
        assert_eq!(known.find(&[user("a"), said("b")]), Some((1, 2)));
    }
}
