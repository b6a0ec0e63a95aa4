//! Demonstrations as token traces, laid out exactly as a rollout would lay them out.

use crate::chat::{ChatTemplate, Message, RenderOptions, Role, ToolSpec};
use crate::engine::Tokenizer;
use crate::trajectory::TokenTrace;

use super::RolloutError;

/// Returns the trace of a demonstrated conversation: assistant turns, their end-of-turn token
/// included, are what the policy is to sample; everything else is prompt or observation.
///
/// Later turns are tokenised as [`Collector`](super::Collector) does, so a model that was tuned on
/// demonstrations meets the same ids when it acts.
///
/// `name` names the demonstration in errors.
///
/// # Errors
///
/// Fails where the conversation does not begin with a prompt and end with an assistant turn, or
/// where the template cannot render it append-only.
pub fn trace_demonstration(
    messages: &[Message],
    tools: &[ToolSpec],
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    render: &RenderOptions,
    name: &str,
) -> Result<TokenTrace, RolloutError> {
    let invalid = |reason| RolloutError::Demonstration {
        name: name.to_owned(),
        reason,
    };
    let chat_error = |source| RolloutError::Chat {
        task: name.to_owned(),
        source,
    };
    let end_of_turn = tokenizer
        .eos_token()
        .ok_or_else(|| invalid("the tokenizer has no end-of-turn token (`eos_token`)"))?;
    let is_assistant = |message: &Message| message.role == Role::Assistant;
    let first = messages
        .iter()
        .position(is_assistant)
        .filter(|first| *first > 0)
        .ok_or_else(|| invalid("it must begin with a prompt and hold an assistant turn"))?;
    if !messages.last().is_some_and(is_assistant) {
        return Err(invalid("it must end with an assistant turn"));
    }
    let prompt = template
        .render(
            &messages[..first],
            tools,
            &RenderOptions {
                add_generation_prompt: true,
                ..render.clone()
            },
        )
        .map_err(chat_error)?;
    let mut trace = TokenTrace::new();
    trace
        .push_prompt(&tokenizer.encode_chat(&prompt.text, &prompt.literal)?)
        .map_err(|_| invalid("its prompt could not be traced"))?;
    let mut rest = &messages[first..];
    while let Some((turn, after)) = rest.split_first() {
        let text = turn_text(turn, tools, template, end_of_turn, render)
            .map_err(chat_error)?
            .ok_or_else(|| {
                invalid("the template does not print an assistant turn as it was written")
            })?;
        let ids = tokenizer.encode(&text)?;
        trace
            .push_sampled(&ids, &vec![0.0; ids.len()])
            .map_err(|_| invalid("a turn could not be traced"))?;
        let answers = after.iter().position(is_assistant).unwrap_or(after.len());
        if answers == 0 && !after.is_empty() {
            return Err(invalid("two assistant turns follow each other"));
        }
        if answers > 0 {
            let suffix = template
                .tool_suffix(&after[..answers], tools, end_of_turn, render)
                .map_err(chat_error)?;
            trace.push_observation(&tokenizer.encode_chat(&suffix.text, &suffix.literal)?);
        }
        rest = &after[answers..];
    }
    Ok(trace)
}

/// Returns what the model writes for `turn`, through its end-of-turn token.
///
/// The turn is rendered behind a dummy prompt, so that templates which rewrite earlier turns
/// print it as the last one, the way it is sampled.
fn turn_text(
    turn: &Message,
    tools: &[ToolSpec],
    template: &ChatTemplate,
    end_of_turn: &str,
    render: &RenderOptions,
) -> Result<Option<String>, crate::chat::ChatError> {
    let user = Message::user("dummy");
    let before = template.render(
        std::slice::from_ref(&user),
        tools,
        &RenderOptions {
            add_generation_prompt: true,
            ..render.clone()
        },
    )?;
    let whole = template.render(
        &[user, turn.clone()],
        tools,
        &RenderOptions {
            add_generation_prompt: false,
            ..render.clone()
        },
    )?;
    Ok(whole.text.strip_prefix(&before.text).and_then(|text| {
        let end = text.rfind(end_of_turn)? + end_of_turn.len();
        Some(text[..end].to_owned())
    }))
}
