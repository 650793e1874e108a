{{- define "kvscope.fullname" -}}
{{- if contains "kvscope" .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-kvscope" (.Release.Name | trunc 42 | trimSuffix "-") -}}
{{- end -}}
{{- end }}

{{- define "kvscope.selector" -}}
app.kubernetes.io/name: kvscope
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvscope.labels" -}}
{{ include "kvscope.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "kvscope.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "kvscope.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "kvscope.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- /* What kvscope uses of /healthz: 503 while one of its loops hangs. */}}
{{- define "kvscope.probes" -}}
readinessProbe:
  httpGet: {path: /healthz, port: {{ . }}}
  periodSeconds: 5
livenessProbe:
  httpGet: {path: /healthz, port: {{ . }}}
  periodSeconds: 10
  failureThreshold: 6
{{- end }}

{{- define "kvscope.tokenVariable" -}}
- name: KVSCOPE_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .Values.token.secret | quote }}, key: {{ .Values.token.key | quote }}}
{{- end }}

{{- define "kvscope.agentAccount" -}}
{{ include "kvscope.fullname" . }}-agent
{{- end }}

{{- /* Namespaces with engines, as a JSON list under `names`. */}}
{{- define "kvscope.engineNamespaces" -}}
{{ dict "names" (.Values.agent.namespaces | default (list .Release.Namespace)) | toJson }}
{{- end }}
