//! The protocol of lanes, without input or output: how requests are cut into frames and what a
//! received frame asks for, which frames were sent and answered, which were applied, what happens
//! to those of a lost lane, and how the request that they belong to ends.
//!
//! A sender cuts a [`CutFrame`] from a request. A receiver reads an [`Arrival`] and the [`Run`]s of
//! its own memory that the frame names.
//! A lane is an ordered stream of frames. Frames with an effect are numbered from 1, and the
//! receiver applies them in order, so one number tells what became of all frames before it. A
//! sender keeps [`SentFrames`], a receiver [`AppliedFrames`]. When a lane is lost, each side keeps
//! its half in [`LostLanes`]. The receiver tells the sender how far it got, and the sender decides
//! for each frame whether to count it as done or to send it again ([`Verdict`]). A
//! [`RequestState`] follows one transfer and decides how it ends ([`Effect`]). [`Liveness`] says
//! when a peer counts as silent, and [`Role`] which lane carries what.
//!
//! The engine's driver moves the bytes and calls this module. `peerway::simulation` runs both under
//! seeded schedules.

mod acknowledgement;
mod frame;
mod liveness;
mod lost;
mod request;
mod roles;

pub use acknowledgement::{Applied, AppliedFrames, SentFrame, SentFrames};
pub use frame::{
    Arrival, Asked, CutFrame, FramePieces, GrantName, Named, OneSided, Run, TableAhead, max_frame,
};
pub use liveness::{Beat, Liveness};
pub use lost::{LostLanes, Verdict};
pub use request::{Cut, Effect, Expiry, Loss, RequestState, Route, SignalDue, lane_bit};
pub use roles::{Role, Serves};
