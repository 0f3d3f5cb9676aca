//! Routes for drained nodes and pauses.

use axum::extract::rejection::{JsonRejection, PathRejection};
use axum::extract::{Path as InPath, State};
use axum::routing::{get, put};
use axum::{Json, Router};
use homenode_api::Request as Ask;
use homenode_api::answer::Maintenance;
use homenode_api::http::PauseFor;
use homenode_units::{NodeId, NodeSet, Ns};

use super::Site;
use super::approvals::asked;
use super::problem::Failed;

type Answered = Result<Json<Maintenance>, Failed>;

/// Routes that only read.
pub(super) fn reads() -> Router<Site> {
    Router::new().route("/v1/maintenance", get(maintenance))
}

/// Routes that change something: for operators.
pub(super) fn changes() -> Router<Site> {
    Router::new()
        .route("/v1/maintenance/drains/{id}", put(drain).delete(end_drain))
        .route("/v1/maintenance/pause", put(pause).delete(end_pause))
}

async fn maintenance(State(site): State<Site>) -> Answered {
    asked(&site, Ask::Maintenance).await.map(Json)
}

async fn drain(State(site): State<Site>, node: Result<InPath<u16>, PathRejection>) -> Answered {
    set_drain(&site, node, true).await
}

async fn end_drain(State(site): State<Site>, node: Result<InPath<u16>, PathRejection>) -> Answered {
    set_drain(&site, node, false).await
}

async fn set_drain(site: &Site, node: Result<InPath<u16>, PathRejection>, is_on: bool) -> Answered {
    let InPath(node) = node?;
    let nodes = NodeSet::one(NodeId(node));
    asked(site, Ask::Drain { nodes, is_on }).await.map(Json)
}

async fn pause(State(site): State<Site>, body: Result<Json<PauseFor>, JsonRejection>) -> Answered {
    let Json(PauseFor { span_ns }) = body?;
    asked(&site, Ask::Pause { span_ns }).await.map(Json)
}

async fn end_pause(State(site): State<Site>) -> Answered {
    let span_ns = Ns::ZERO;
    asked(&site, Ask::Pause { span_ns }).await.map(Json)
}
