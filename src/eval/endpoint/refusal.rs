//! What an endpoint means by a refusal.

use crate::proxy::ProxyError;

/// Names that servers have for a conversation that is too long.
const OVERFLOW_CODES: [&str; 3] = [
    "context_length_exceeded",
    "context_window_exceeded",
    "exceed_context_size_error",
];

/// What they say of one, each in its own words, in lower case: all parts of one of these.
const OVERFLOW_WORDS: [&[&str]; 8] = [
    &["context length"],
    &["context window"],
    &["context size"],
    &["context", "exceed"],
    &["context", "too long"],
    // Anthropic; vLLM; Google.
    &["prompt is too long"],
    &["longer than the maximum model length"],
    &["input token count", "exceeds"],
];

/// What helps where the key is refused.
const KEY: &str = "check the key (`--api-key-env`)";

/// Returns whether a request was refused because the conversation is longer than the model reads.
pub(super) fn is_overflow(error: &ProxyError) -> bool {
    let ProxyError::Refused {
        status: 400 | 413 | 422,
        message,
        code,
        ..
    } = error
    else {
        return false;
    };
    let message = message.to_lowercase();
    let is_said = |words: &&[&str]| words.iter().all(|word| message.contains(word));
    let is_named = |code: &String| OVERFLOW_CODES.contains(&code.as_str());
    code.as_ref().is_some_and(is_named) || OVERFLOW_WORDS.iter().any(is_said)
}

/// Returns what helps against an error that every episode would meet, if it is one. Where some were answered,
/// most are of this one alone: a gateway may refuse a conversation for what it says.
pub(super) fn remedy(error: &ProxyError, has_answered: bool) -> Option<&'static str> {
    let (ProxyError::Refused { status, .. } | ProxyError::Unavailable { status, .. }) = error
    else {
        return None;
    };
    match status {
        401 => Some(KEY),
        403 if !has_answered => Some(KEY),
        300..400 => Some("check the address: it leads elsewhere, where no key is sent after it"),
        404 if !has_answered => {
            Some("check the address, which ends in `/v1`, and the name of the model (`--model`)")
        }
        400 | 422 if !has_answered && !is_overflow(error) => Some(
            "check the model, leave the tools out (`--no-tools`) if the server reads no calls, or change \
             fields (`--extra`)",
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(message: &str, code: Option<&str>) -> ProxyError {
        ProxyError::Refused {
            status: 400,
            message: message.to_owned(),
            code: code.map(str::to_owned),
            retry_after: None,
        }
    }

    #[test]
    fn a_conversation_that_is_too_long_is_known_in_the_words_of_many_servers() {
        for message in [
            "This model's maximum context length is 64 tokens. However, you requested 70 tokens.",
            "Maximum Context Length exceeded",
            "The decoder prompt (length 70) is longer than the maximum model length of 64.",
            "The input (70 tokens) is longer than the model's context length (64 tokens).",
            "the request exceeds the available context size. try increasing the context size",
            "prompt is too long: 70 tokens > 64 maximum",
            "The input token count (70) exceeds the maximum number of tokens allowed (64).",
        ] {
            assert!(is_overflow(&refused(message, None)), "{message}");
            assert_eq!(remedy(&refused(message, None), false), None, "{message}");
        }
        assert!(is_overflow(&refused("no", Some("context_length_exceeded"))));
        for message in [
            "tools are not supported in this context",
            "max_tokens must be at most 16",
            "the name of the model is too long",
        ] {
            assert!(!is_overflow(&refused(
                message,
                Some("invalid_request_error")
            )));
            assert!(remedy(&refused(message, None), false).is_some());
            assert_eq!(remedy(&refused(message, None), true), None);
        }
        let unavailable = ProxyError::Unavailable {
            status: 301,
            retry_after: None,
        };
        assert!(remedy(&unavailable, true).is_some_and(|text| text.contains("address")));
    }

    #[test]
    fn a_conversation_that_a_gateway_refuses_is_not_the_end_of_all() {
        for (status, ends_all) in [(401, true), (301, true), (403, false), (404, false)] {
            let unavailable = ProxyError::Unavailable {
                status,
                retry_after: None,
            };
            assert!(remedy(&unavailable, false).is_some());
            assert_eq!(remedy(&unavailable, true).is_some(), ends_all, "{status}");
        }
    }
}
