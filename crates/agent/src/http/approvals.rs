//! Routes for recommendations that wait for the operator, and for reservations of VMs.

use axum::extract::rejection::PathRejection;
use axum::extract::{Path as InPath, State};
use axum::http::StatusCode;
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use homenode_api::Request as Ask;
use homenode_api::answer::{Answer, Recommendation, Recommendations, Reservations};

use super::Site;
use super::problem::Failed;
use crate::handler::Answered;

/// Routes that only read.
pub(super) fn reads() -> Router<Site> {
    Router::new()
        .route("/v1/recommendations", get(recommendations))
        .route("/v1/reservations", get(reservations))
        // The name that reservations had up to 0.2.0.
        .route("/v1/promises", get(reservations))
}

/// Routes that change something: for operators.
pub(super) fn changes() -> Router<Site> {
    Router::new()
        .route("/v1/recommendations/{id}/apply", post(apply))
        .route("/v1/recommendations/{id}/reject", post(reject))
        .route("/v1/reservations/{id}", delete(drop_reservation))
        .route("/v1/promises/{id}", delete(drop_reservation))
}

/// Sends a request to the handler, on a thread that may wait for the loop's state.
pub(super) async fn asked<A: TryFrom<Answer, Error = Answer>>(
    site: &Site,
    question: Ask,
) -> Result<A, Failed> {
    let handler = site.handler.clone();
    match site.on_a_thread(move || handler.answer(question)).await?? {
        Answered::Now(answer) => A::try_from(answer).map_err(|_| Failed::gone()),
        Answered::Once(..) => Err(Failed::gone()),
    }
}

async fn recommendations(State(site): State<Site>) -> Result<Json<Recommendations>, Failed> {
    asked(&site, Ask::Recommendations).await.map(Json)
}

async fn reservations(State(site): State<Site>) -> Result<Json<Reservations>, Failed> {
    asked(&site, Ask::Reservations).await.map(Json)
}

async fn apply(
    State(site): State<Site>,
    id: Result<InPath<u64>, PathRejection>,
) -> Result<Json<Recommendation>, Failed> {
    let InPath(id) = id?;
    asked(&site, Ask::RecommendationApply { id }).await.map(Json)
}

async fn reject(
    State(site): State<Site>,
    id: Result<InPath<u64>, PathRejection>,
) -> Result<Json<Recommendation>, Failed> {
    let InPath(id) = id?;
    asked(&site, Ask::RecommendationReject { id }).await.map(Json)
}

async fn drop_reservation(
    State(site): State<Site>,
    id: Result<InPath<u64>, PathRejection>,
) -> Result<StatusCode, Failed> {
    let InPath(id) = id?;
    let _: homenode_api::answer::ReservationDropped = asked(&site, Ask::ReservationDrop { id }).await?;
    Ok(StatusCode::NO_CONTENT)
}
