//! A hook round every call.

use std::fmt;

use async_trait::async_trait;
use serde_json::{Map, Value};

use crate::contain::{Contained, Foreign, Panicked};
use crate::context::PlanId;
use crate::descriptor::ToolDescriptor;
use crate::tool::{ToolFailure, ToolOutput};

/// A hook round every call of a runtime, nested ones too: for logging, rules, caching.
///
/// Layers stand round each other as they were given to the builder, the first outermost. `before`
/// is called when the tool is known and nothing is checked yet: what it lets pass, and what it
/// makes of the input, still goes by the gate, the schema and the approval, and an answer that it
/// gives still goes by the gate and the schemas. So a layer can take away from what a call may do,
/// and never add to it.
///
/// # Examples
///
/// A cache of answers:
///
/// ```
/// use std::collections::HashMap;
/// use std::sync::Mutex;
/// use toolscope::{Before, Layer, LayerCall, ToolFailure, ToolOutput, async_trait};
///
/// #[derive(Default)]
/// struct Cache(Mutex<HashMap<String, ToolOutput>>);
///
/// #[async_trait]
/// impl Layer for Cache {
///     async fn before(&self, call: &LayerCall<'_>) -> Before {
///         let key = format!("{} {}", call.tool.name, call.input);
///         let known = self.0.lock().ok().and_then(|known| known.get(&key).cloned());
///         match known.filter(|_| call.tool.capability.read_only) {
///             Some(output) => Before::Answer(output),
///             None => Before::Continue,
///         }
///     }
///
///     async fn after(&self, call: &LayerCall<'_>, given: Given) -> Given {
///         if let (Ok(output), Ok(mut known)) = (&given, self.0.lock()) {
///             known.insert(format!("{} {}", call.tool.name, call.input), output.clone());
///         }
///         given
///     }
/// }
/// # type Given = Result<ToolOutput, ToolFailure>;
/// ```
#[async_trait]
pub trait Layer: Send + Sync + 'static {
    /// Before the gate. A panic refuses the call.
    ///
    /// The future is dropped when the call is cancelled or the plan ends. Its time counts as time
    /// of the call.
    async fn before(&self, call: &LayerCall<'_>) -> Before {
        let _ = call;
        Before::Continue
    }

    /// After the tool gave an output or a failure, or a layer inside this one an answer; what is
    /// returned takes its place. Not called for a call that was refused, stopped, or panicked. The
    /// first layer's is the last.
    ///
    /// As [`before`](Self::before) it is dropped when the call is cancelled, and what the tool gave
    /// is lost then.
    async fn after(
        &self,
        call: &LayerCall<'_>,
        given: Result<ToolOutput, ToolFailure>,
    ) -> Result<ToolOutput, ToolFailure> {
        let _ = call;
        given
    }
}

/// What a layer decides before a call.
#[derive(Clone, PartialEq)]
#[non_exhaustive]
pub enum Before {
    /// Goes on.
    Continue,
    /// Goes on with another input.
    Change(Value),
    /// Answers in the tool's place: it is neither activated nor run. The gate, the schema of the
    /// input and that of the output hold as for the tool's own.
    Answer(ToolOutput),
    /// Refuses, and says why: `AccessDenied`.
    Refuse(String),
}

impl fmt::Debug for Before {
    /// Without an input and without an output: a log must not have them by accident.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Continue => f.write_str("Continue"),
            Self::Change(_) => f.debug_tuple("Change").finish_non_exhaustive(),
            Self::Answer(_) => f.debug_tuple("Answer").finish_non_exhaustive(),
            Self::Refuse(reason) => f.debug_tuple("Refuse").field(reason).finish(),
        }
    }
}

/// The facts of a call, for a layer.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct LayerCall<'a> {
    /// The plan.
    pub plan_id: PlanId,
    /// The call within its plan.
    pub call_id: u64,
    /// The call that made this one, where it is a nested one.
    pub parent_call_id: Option<u64>,
    /// The tool.
    pub tool: &'a ToolDescriptor,
    /// The input: in `after`, the one that the tool was given.
    pub input: &'a Value,
    /// What the host said about the plan.
    pub metadata: &'a Map<String, Value>,
}

impl fmt::Debug for LayerCall<'_> {
    /// Without the input: a log must not have it by accident.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayerCall")
            .field("plan_id", &self.plan_id)
            .field("call_id", &self.call_id)
            .field("tool", &self.tool.name)
            .finish_non_exhaustive()
    }
}

/// The layers of a runtime, the first outermost.
#[derive(Default)]
pub(crate) struct Layers(Vec<Foreign<Box<dyn Layer>>>);

/// What the layers made of a call before its gate.
pub(crate) struct Entered {
    /// How many of them the call has passed, and will pass again on its way out.
    pub(crate) passed: usize,
    pub(crate) input: Option<Value>,
    pub(crate) answer: Option<ToolOutput>,
}

impl Layers {
    pub(crate) fn add(&mut self, layer: impl Layer) {
        self.0.push(Foreign::new(Box::new(layer)));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The way in. An error says why the call is refused, and whether that is for the host only.
    pub(crate) async fn enter(&self, call: &LayerCall<'_>) -> Result<Entered, (String, bool)> {
        let mut entered = Entered { passed: 0, input: None, answer: None };
        for layer in &self.0 {
            let input = entered.input.as_ref().unwrap_or(call.input);
            let call = LayerCall { input, ..*call };
            match Contained::new(|| layer.before(&call)).await {
                Ok(Before::Continue) => {}
                Ok(Before::Change(input)) => entered.input = Some(input),
                Ok(Before::Answer(output)) => {
                    entered.answer = Some(output);
                    break;
                }
                Ok(Before::Refuse(reason)) => return Err((reason, false)),
                Err(panicked) => {
                    return Err((format!("a layer panicked: {}", panicked.text), true));
                }
            }
            entered.passed += 1;
        }
        Ok(entered)
    }

    /// The way out, through the layers that the call passed on its way in. An error is the text of
    /// a panic.
    pub(crate) async fn leave(
        &self,
        call: &LayerCall<'_>,
        passed: usize,
        mut given: Result<ToolOutput, ToolFailure>,
    ) -> Result<Result<ToolOutput, ToolFailure>, String> {
        for layer in self.0.iter().take(passed).rev() {
            given = match Contained::new(|| layer.after(call, given)).await {
                Ok(given) => given,
                Err(Panicked { text, .. }) => return Err(format!("a layer panicked: {text}")),
            };
        }
        Ok(given)
    }
}
